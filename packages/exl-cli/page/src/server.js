// Requests to the server that the page comes from.

export class ServerError extends Error {}

export class KeyError extends ServerError {}

// `key()`: the API key, or null. `fetcher`: the browser's fetch.
export class Server {
  constructor(key, fetcher = (...given) => fetch(...given)) {
    this.key = key;
    this.fetcher = fetcher;
  }

  async request(path, options = {}) {
    const headers = { "Content-Type": "application/json" }, key = this.key();
    if (key) headers.Authorization = `Bearer ${key}`;
    let answer;
    try {
      answer = await this.fetcher(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(`The server does not answer: ${error.message}`);
    }
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => null);
    const said = body?.error?.message ?? body?.error ?? `The server answered ${answer.status}`;
    throw new (answer.status === 401 ? KeyError : ServerError)(String(said));
  }

  async models() {
    return (await (await this.request("v1/models")).json()).data;
  }

  // Loads a model, and returns once it is loaded.
  async load(model) {
    await this.request("api/generate", { method: "POST", body: JSON.stringify({ model }) });
  }

  // Events of a streamed reply.
  async* reply(body, signal) {
    const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
    const options = { method: "POST", body: JSON.stringify(wanted), signal };
    const answer = await this.request("v1/chat/completions", options);
    yield* eventsOf(answer.body);
  }
}

// JSON values of server-sent events, up to `[DONE]`.
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError("The connection ended before the reply did");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
