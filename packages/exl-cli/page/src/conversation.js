// Conversations as trees of turns. Knows neither the page nor the server nor the storage.
//
// A turn is a message of the user or a reply. It has one parent, the turn that it answers; turns with
// one parent are variants. `chosen` names the variant that is shown below each parent. Nothing is
// ever overwritten: an edited message and a retried reply are new variants.

const TITLE_CHARS = 60;
export const ROOT = "";

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(9))].map((one) => one.toString(36).padStart(2, "0")).join("");
}

export function newConversation(now = Date.now()) {
  return { id: newId(), title: "", created: now, updated: now, turns: {}, chosen: {} };
}

export function newTurn(parent, role, text, more = {}) {
  return {
    id: newId(), parent, role, text, reasoning: "", model: "", end: null, error: "", about: "",
    created: Date.now(), ...more,
  };
}

export function add(conversation, turn) {
  conversation.turns[turn.id] = turn;
  choose(conversation, turn);
  conversation.updated = Date.now();
}

export function choose(conversation, turn) {
  conversation.chosen[turn.parent] = turn.id;
}

// Turns with this parent, oldest first.
export function childrenOf(conversation, parent) {
  const found = Object.values(conversation.turns).filter((turn) => turn.parent === parent);
  return found.sort((a, b) => a.created - b.created);
}

export function variantsOf(conversation, turn) {
  return childrenOf(conversation, turn.parent);
}

// The shown turns, from the first to the last.
export function shownTurns(conversation) {
  const byParent = new Map();
  for (const turn of Object.values(conversation.turns)) {
    const other = byParent.get(turn.parent), chosen = conversation.chosen[turn.parent];
    if (!other || turn.id === chosen || (other.id !== chosen && turn.created >= other.created)) {
      byParent.set(turn.parent, turn);
    }
  }
  const shown = [], seen = new Set();
  for (let turn = byParent.get(ROOT); turn && !seen.has(turn.id); turn = byParent.get(turn.id)) {
    seen.add(turn.id);
    shown.push(turn);
  }
  return shown;
}

// Turns from the first to this one, of whatever variant.
export function turnsUpTo(conversation, id) {
  const found = [], seen = new Set();
  for (let turn = conversation.turns[id]; turn && !seen.has(turn.id); turn = conversation.turns[turn.parent]) {
    seen.add(turn.id);
    found.unshift(turn);
  }
  return found;
}

// Messages of a request whose reply follows the turn `id`, or continues it. A message whose reply is
// empty is left out together with it: the reply failed.
export function messagesUpTo(conversation, id, system = "") {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  const turns = turnsUpTo(conversation, id);
  turns.forEach((turn, i) => {
    const reply = turns[i + 1];
    if (turn.role === "user" && reply && !reply.text.trim()) return;
    if (turn.role === "assistant" && !turn.text.trim()) return;
    messages.push({ role: turn.role, content: turn.text });
  });
  return messages;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = shownTurns(conversation).find((turn) => turn.role === "user");
  const line = (first?.text ?? "").trim().split("\n", 1)[0].trim();
  if (!line) return "New chat";
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}

// Do all words of the query occur in the title or in any turn?
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const turns = Object.values(conversation.turns);
  const text = [titleOf(conversation), ...turns.map((turn) => turn.text)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

// The shown turns as Markdown.
export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  for (const turn of shownTurns(conversation)) {
    const who = turn.role === "user" ? "You" : turn.model || "Reply";
    parts.push(`## ${who}`, turn.text.trim());
  }
  return `${parts.join("\n\n")}\n`;
}

export function fileName(conversation, ending) {
  const name = titleOf(conversation).normalize("NFKD").replace(/[^\w]+/g, "-").replace(/^-+|-+$/g, "");
  return `${name.slice(0, 50) || "chat"}.${ending}`;
}

// Both versions of one conversation: all turns of both, and the choices of the newer one. Two tabs
// may have written them. The text of a turn only grows, so the longer one is the later one.
export function merged(stored, current) {
  if (!stored || stored.id !== current.id) return current;
  const [older, newer] = stored.updated > current.updated ? [current, stored] : [stored, current];
  const turns = { ...stored.turns };
  const size = (turn) => turn.text.length + turn.reasoning.length;
  for (const [id, turn] of Object.entries(current.turns)) {
    if (!turns[id] || size(turn) >= size(turns[id])) turns[id] = turn;
  }
  return { ...newer, turns, chosen: { ...older.chosen, ...newer.chosen } };
}

// A conversation from a parsed file or from storage. Raises TypeError for anything else.
export function checked(value) {
  const isText = (one) => typeof one === "string";
  const isObject = (one) => one !== null && typeof one === "object" && !Array.isArray(one);
  if (!isObject(value) || !isText(value.id) || !value.id || !isObject(value.turns)) {
    throw new TypeError("this is not a conversation of this page");
  }
  const turns = {};
  for (const [id, turn] of Object.entries(value.turns)) {
    const isTurn = isObject(turn) && turn.id === id && isText(turn.parent) && isText(turn.text)
      && ["user", "assistant"].includes(turn.role);
    if (!isTurn) throw new TypeError("a turn of this conversation cannot be read");
    const texts = Object.fromEntries(["reasoning", "model", "error", "about"].map(
      (name) => [name, isText(turn[name]) ? turn[name] : ""]));
    const created = Number.isFinite(turn.created) ? turn.created : 0;
    turns[id] = { ...newTurn(turn.parent, turn.role, turn.text, texts), id, created, end: isText(turn.end) ? turn.end : null };
  }
  const chosen = Object.fromEntries(Object.entries(isObject(value.chosen) ? value.chosen : {}).filter(([, one]) => isText(one)));
  const [created, updated] = [value.created, value.updated].map((one) => (Number.isFinite(one) ? one : 0));
  return { id: value.id, title: isText(value.title) ? value.title : "", created, updated, turns, chosen };
}
