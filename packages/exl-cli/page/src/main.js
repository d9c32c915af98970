// The chat page: puts its parts together and answers to the user.

import { add, choose, newConversation, newTurn, ROOT, shownTurns, titleOf, variantsOf } from "./conversation.js";
import { $, button, copyText } from "./elements.js";
import { aboutModel, Models } from "./models.js";
import { aboutReply, Reply } from "./reply.js";
import { Server } from "./server.js";
import { addShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { TurnView } from "./turns.js";

const EXAMPLES = [
  "Explain in two sentences why the sky is blue.",
  "Write a Python function that tests whether a number is prime.",
  "Compare TCP and UDP in a table.",
  "Derive the formula for the roots of a quadratic equation.",
];
const THEMES = { "": ["◐", "Theme: system"], light: ["☀", "Theme: light"], dark: ["☾", "Theme: dark"] };
const SAVE_MS = 1000;

const store = new Store(localStorage, sessionStorage);
const server = new Server(() => store.key);
const models = new Models(server, { onChange: () => { showEmpty(); saveSettings(); }, onProblem: showProblem });
const sidebar = new Sidebar({ list: allConversations, open, rename, remove });
const fields = [...$("fields").elements].filter((one) => one.name);
const running = new Map(); // replies by the id of their conversation
const views = new Map(); // views of the shown turns, by id
let conversation = newConversation();

// What is shown

function show() {
  const reply = running.get(conversation.id), turns = shownTurns(conversation);
  for (const id of views.keys()) if (!conversation.turns[id]) views.delete(id);
  const shown = turns.map((turn) => {
    let view = views.get(turn.id);
    if (view?.turn !== turn) view = new TurnView(turn, { edit, retry, continueReply, choose: chooseVariant });
    views.set(turn.id, view);
    showTurn(view);
    return view.root;
  });
  const log = $("log");
  if (shown.length !== log.children.length || shown.some((one, i) => one !== log.children[i])) log.replaceChildren(...shown);
  $("pending").hidden = !reply?.isWaiting;
  $("pending").textContent = models.loading ? `Loading ${models.loading}…` : "Waiting for the reply…";
  $("send").hidden = Boolean(reply);
  $("stop").hidden = !reply;
  document.title = turns.length ? `${titleOf(conversation)} · exl` : "exl";
  showEmpty();
}

function showTurn(view) {
  const reply = running.get(conversation.id);
  view.show(conversation, { isRunning: reply?.turn === view.turn, isBusy: Boolean(reply) });
}

function showEmpty() {
  const isEmpty = !Object.keys(conversation.turns).length;
  $("empty").hidden = !isEmpty;
  $("empty-name").textContent = models.shown?.id ?? "";
  $("empty-about").textContent = aboutModel(models.shown);
}

function showFailure(message) {
  $("failure").hidden = !message;
  $("failure").textContent = message;
}

function showProblem(message) {
  $("status").textContent = message || store.problems.join(" ");
}

function follow(change) { // keeps the end visible, unless the user has scrolled up
  const box = $("scroll"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function scrollToEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

// Conversations

function allConversations() {
  const stored = store.list();
  const unsaved = [...running.values()].map((reply) => reply.conversation);
  return stored.map((one) => unsaved.find((other) => other.id === one.id) ?? one);
}

function save(one = conversation) {
  if (!Object.keys(one.turns).length) return;
  try {
    store.save(one);
    showProblem("");
  } catch (error) {
    showProblem(`This browser cannot store the conversation: ${error.message}. Delete or export others.`);
  }
}

function open(id) {
  const found = running.get(id)?.conversation ?? store.load(id);
  if (!found) return;
  for (const turn of Object.values(found.turns)) {
    if (turn.end === null && turn.role === "assistant" && running.get(id)?.turn !== turn) {
      Object.assign(turn, { end: "interrupted", about: aboutReply("interrupted") });
    }
  }
  showConversation(found);
}

function showConversation(one) {
  conversation = one;
  store.currentId = one.id;
  views.clear();
  showFailure("");
  show();
  sidebar.show(one.id);
  openSide(false);
  scrollToEnd();
  $("input").focus();
}

function newChat() {
  $("search").value = "";
  showConversation(newConversation());
}

function rename(id, title) {
  const one = id === conversation.id ? conversation : running.get(id)?.conversation ?? store.load(id);
  one.title = title;
  one.updated = Date.now();
  save(one);
  sidebar.show();
  show();
}

function remove(id) {
  running.get(id)?.stop();
  const reply = running.get(id);
  if (reply) reply.wasDropped = true;
  store.remove(id);
  if (id === conversation.id) newChat();
  else sidebar.show();
}

// Replies

function requestSettings() {
  const settings = { system: "", model: models.requested, fields: {} };
  for (const field of fields) {
    if (field.name === "system") settings.system = field.value;
    else if (field.value !== "") settings.fields[field.name] = Number(field.value);
  }
  return settings;
}

async function answer(parent, continued = null) {
  const own = conversation;
  if (running.has(own.id)) return;
  if (!fields.every((field) => field.checkValidity())) {
    openSettings();
    $("fields").reportValidity();
    return;
  }
  const reply = new Reply(own, { parent, continued, settings: requestSettings() });
  running.set(own.id, reply);
  showFailure("");
  const endLoading = models.watch(); // the chosen model may not be loaded yet
  show();
  let isDue = false, isListed = false;
  const onChange = () => {
    if (reply.turn && !isListed) {
      isListed = true;
      endLoading();
      if (own === conversation) follow(show);
      sidebar.show();
    }
    if (isDue || own !== conversation) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      const view = reply.turn && views.get(reply.turn.id);
      if (view && own === conversation) follow(() => showTurn(view));
    });
  };
  const saving = setInterval(() => save(own), SAVE_MS);
  await reply.run(server, onChange);
  clearInterval(saving);
  endLoading();
  running.delete(own.id);
  if (!reply.wasDropped) save(own);
  if (own === conversation) {
    follow(() => { show(); showFailure(reply.turn ? "" : reply.error); });
  }
  sidebar.show();
  if (reply.error) await models.list(); // the server may have other models by now
}

function send(text, parent) {
  const ask = newTurn(parent, "user", text);
  add(conversation, ask);
  save();
  sidebar.show(conversation.id);
  show();
  scrollToEnd();
  answer(ask);
}

function sendInput() {
  const text = $("input").value;
  if (running.has(conversation.id) || !text.trim()) return;
  if (!fields.every((field) => field.checkValidity())) return answer(null);
  write("");
  $("input").focus();
  send(text, shownTurns(conversation).at(-1)?.id ?? ROOT);
}

function edit(turn, text) {
  if (running.has(conversation.id)) return;
  if (turn.role === "user") return send(text, turn.parent);
  add(conversation, newTurn(turn.parent, "assistant", text, { model: turn.model, end: "edited", about: "edited" }));
  save();
  show();
}

function retry(turn) {
  answer(turn.role === "user" ? turn : conversation.turns[turn.parent]);
}

function continueReply(turn) {
  answer(conversation.turns[turn.parent], turn);
}

function chooseVariant(turn, focused) {
  choose(conversation, turn);
  conversation.updated = Date.now();
  save();
  show();
  const same = [...views.get(turn.id).variants.querySelectorAll("button")].find((one) => one.ariaLabel === focused);
  same?.focus();
}

function lastReply() {
  return shownTurns(conversation).filter((turn) => turn.role === "assistant").at(-1);
}

// Settings

function saveSettings() {
  const values = Object.fromEntries(fields.map((field) => [field.name, field.value]));
  const theme = document.documentElement.dataset.theme || "";
  try {
    store.saveSettings({ fields: values, theme, model: models.chosen });
  } catch (error) {
    showProblem(`This browser cannot store the settings: ${error.message}`);
  }
}

function restoreSettings() {
  const { fields: values = {}, theme = "", model = "" } = store.settings();
  for (const field of fields) field.value = values[field.name] ?? field.value;
  setTheme(theme in THEMES ? theme : "");
  models.chosen = model;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const [sign, name] = THEMES[theme];
  Object.assign($("theme"), { textContent: sign, ariaLabel: name, title: name });
}

function nextTheme() {
  const names = Object.keys(THEMES), at = names.indexOf(document.documentElement.dataset.theme || "");
  setTheme(names[(at + 1) % names.length]);
  saveSettings();
}

function openSettings() {
  if (!$("settings").open) $("settings").showModal();
}

function openSide(isOpen) {
  document.body.classList.toggle("with-side", isOpen);
  $("shade").hidden = !isOpen;
}

// Input of the user

function write(text) {
  $("input").value = text;
  store.draft = text;
  fitInput();
}

function fitInput() { // for browsers without `field-sizing`
  if (CSS.supports("field-sizing", "content")) return;
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function stop() {
  running.get(conversation.id)?.stop();
  $("input").focus();
}

const shortcuts = {
  newChat, stop, nextTheme,
  search: () => { openSide(true); $("search").select(); },
  help: () => $("help").showModal(),
  retryLast: () => { const turn = lastReply() ?? shownTurns(conversation).at(-1); if (turn) retry(turn); },
  copyLast: () => { const turn = lastReply(), view = turn && views.get(turn.id); if (view) copyText(turn.text, view.text, view.buttons.copy); },
  stepVariant: (by) => {
    const turn = lastReply();
    if (!turn || running.has(conversation.id)) return;
    const variants = variantsOf(conversation, turn), other = variants[variants.indexOf(turn) + by];
    if (other) chooseVariant(other);
  },
};

$("compose").addEventListener("submit", (event) => { event.preventDefault(); sendInput(); });
$("input").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    sendInput();
  } else if (event.key === "ArrowUp" && !$("input").value && !running.has(conversation.id)) {
    const last = shownTurns(conversation).filter((turn) => turn.role === "user").at(-1);
    if (!last) return;
    event.preventDefault();
    views.get(last.id).edit();
  }
});
$("input").addEventListener("input", () => { store.draft = $("input").value; fitInput(); });
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", newChat);
$("open-side").addEventListener("click", () => openSide(true));
for (const id of ["close-side", "shade"]) $(id).addEventListener("click", () => openSide(false));
$("theme").addEventListener("click", nextTheme);
$("open-settings").addEventListener("click", openSettings);
$("show-help").addEventListener("click", shortcuts.help);
$("fields").addEventListener("change", saveSettings);
$("key").addEventListener("submit", async (event) => {
  event.preventDefault();
  store.key = $("key-input").value;
  await models.list();
  if ($("key").hidden) $("input").focus();
});
addEventListener("storage", ({ key }) => { // another tab has written
  if (key === null || store.idOfKey(key)) sidebar.show();
  if (store.idOfKey(key) !== conversation.id || running.has(conversation.id)) return;
  const written = store.load(conversation.id);
  if (!written) return newChat();
  conversation = written;
  show();
});
addEventListener("pagehide", () => {
  for (const reply of running.values()) {
    reply.finish("interrupted");
    reply.wasDropped = true;
    save(reply.conversation);
    reply.stop();
  }
});

$("examples").replaceChildren(...EXAMPLES.map((text) => button(text, () => { write(text); sendInput(); })));
addShortcuts(shortcuts);
store.takeOverOld();
restoreSettings();
const restored = store.currentId && store.load(store.currentId);
if (restored) open(restored.id);
else newChat();
write(store.draft);
showProblem("");
models.list();
