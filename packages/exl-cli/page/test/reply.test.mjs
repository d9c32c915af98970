import assert from "node:assert/strict";
import { test } from "node:test";

import { add, newConversation, newTurn, ROOT, shownTurns, variantsOf } from "../src/conversation.js";
import { Reply } from "../src/reply.js";
import { eventsOf, KeyError, Server, ServerError } from "../src/server.js";

const SETTINGS = { system: "Be kind.", model: "m", fields: { seed: 7 } };
const piece = (content, more = {}) => ({ model: "served", choices: [{ delta: { content }, finish_reason: null, ...more }] });
const END = { choices: [{ delta: {}, finish_reason: "length" }] };
const USAGE = { choices: [], usage: { completion_tokens: 2, prompt_tokens: 5 }, timings: { predicted_per_second: 10, cache_n: 3 } };

function asked() {
  const one = newConversation(), ask = newTurn(ROOT, "user", "Hi", { created: 1 });
  add(one, ask);
  return { one, ask };
}

function answered() {
  const { one, ask } = asked(), reply = newTurn(ask.id, "assistant", "Old", { created: 2, end: "stop" });
  add(one, reply);
  return { one, ask, reply };
}

function serverOf(events, seen = {}) {
  return { async* reply(body, signal) {
    Object.assign(seen, { body, signal });
    for (const event of events) {
      if (event instanceof Error) throw event;
      yield event;
    }
  } };
}

test("a reply joins the conversation with its first token", async () => {
  const { one, ask } = asked(), seen = {};
  const reply = new Reply(one, { parent: ask, settings: SETTINGS });
  const counts = [];
  const events = [piece(""), piece("He"), piece("y"), END, USAGE];
  await reply.run(serverOf(events, seen), () => counts.push(shownTurns(one).length));
  assert.deepEqual(counts, [1, 2, 2, 2, 2, 2]);
  assert.deepEqual(seen.body, {
    seed: 7, model: "m", messages: [{ role: "system", content: "Be kind." }, { role: "user", content: "Hi" }],
  });
  const { text, end, about, model } = reply.turn;
  assert.deepEqual([text, end, model], ["Hey", "length", "served"]);
  assert.equal(about, "cut off by the token limit · 2 tokens · 10.0 tokens/s · prompt 5 (3 cached)");
});

for (const [name, failure] of [["fails", new ServerError("no")], ["is stopped", Object.assign(new Error(), { name: "AbortError" })]]) {
  test(`a retry that ${name} before its first token loses nothing`, async () => {
    const { one, ask, reply: old } = answered(), before = structuredClone(one.turns);
    const reply = new Reply(one, { parent: ask, settings: SETTINGS });
    await reply.run(serverOf([piece(""), failure]));
    assert.deepEqual(one.turns, before);
    assert.deepEqual(shownTurns(one).at(-1), old);
    assert.equal(reply.error, failure instanceof ServerError ? "no" : "");
  });
}

test("a retry adds a variant and shows it", async () => {
  const { one, ask, reply: old } = answered();
  const reply = new Reply(one, { parent: ask, settings: SETTINGS });
  await reply.run(serverOf([{ choices: [{ delta: { reasoning_content: "hm" } }] }, piece("New"), END, USAGE]));
  assert.deepEqual(variantsOf(one, reply.turn).map((turn) => turn.text), ["Old", "New"]);
  assert.equal(shownTurns(one).at(-1), reply.turn);
  assert.equal(reply.turn.reasoning, "hm");
  assert.equal(old.text, "Old");
});

test("a reply that fails later keeps its text and says why", async () => {
  const { one, ask } = asked(), reply = new Reply(one, { parent: ask, settings: SETTINGS });
  await reply.run(serverOf([piece("Half"), { error: { message: "out of memory" } }]));
  assert.deepEqual([reply.turn.text, reply.turn.error, reply.turn.end], ["Half", "out of memory", "failed"]);
});

test("the last reply goes on in its place, an earlier one as a variant", async () => {
  const { one, ask, reply: old } = answered(), seen = {};
  const next = new Reply(one, { parent: ask, continued: old, settings: SETTINGS });
  await next.run(serverOf([piece("er."), END], seen));
  assert.equal(seen.body.continue_final_message, true);
  assert.deepEqual(seen.body.messages.at(-1), { role: "assistant", content: "Old" });
  assert.equal(old.text, "Older.");
  add(one, newTurn(old.id, "user", "more", { created: 3 }));
  const again = new Reply(one, { parent: ask, continued: old, settings: SETTINGS });
  await again.run(serverOf([piece("!"), END]));
  assert.deepEqual(variantsOf(one, old).map((turn) => turn.text), ["Older.", "Older.!"]);
  assert.equal(shownTurns(one).length, 2);
});

const streamOf = (text, size = 7) => new ReadableStream({
  start(to) {
    const bytes = new TextEncoder().encode(text);
    for (let i = 0; i < bytes.length; i += size) to.enqueue(bytes.slice(i, i + size));
    to.close();
  },
});

test("events are read across pieces of any size", async () => {
  const text = 'data: {"a":"ü"}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n';
  for (const size of [1, 2, 3, 100]) {
    const found = [];
    for await (const event of eventsOf(streamOf(text, size))) found.push(event.a);
    assert.deepEqual(found, ["ü", 2]);
  }
  const cut = eventsOf(streamOf('data: {"a":1}\n\n'));
  assert.deepEqual((await cut.next()).value, { a: 1 });
  await assert.rejects(() => cut.next(), /ended before the reply/);
});

test("errors of the server have its message; a missing key is an error of its own", async () => {
  const answers = (status, body) => new Server(() => "k", async (path, { headers }) => {
    assert.equal(headers.Authorization, "Bearer k");
    return new Response(body, { status });
  });
  const failed = { error: { message: "top_p: too large" } };
  await assert.rejects(() => answers(400, JSON.stringify(failed)).models(), /top_p: too large/);
  await assert.rejects(() => answers(401, "{}").models(), KeyError);
  await assert.rejects(() => answers(502, "<html>").models(), /answered 502/);
  const gone = new Server(() => null, async () => { throw new TypeError("refused"); });
  await assert.rejects(() => gone.models(), /does not answer: refused/);
});
