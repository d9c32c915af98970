// Keyboard shortcuts of the page.

import { $, make } from "./elements.js";

const LISTED = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "Start a new line"],
  ["Escape", "Stop the reply"],
  ["↑ in an empty message", "Edit the last message"],
  ["Ctrl+K", "Search conversations"],
  ["Alt+N", "New chat"],
  ["Alt+R", "Retry the last reply"],
  ["Alt+C", "Copy the last reply"],
  ["Alt+←, Alt+→", "Previous or next variant of the last reply"],
  ["Alt+T", "Theme"],
  ["?", "This list"],
];

// `act`: functions of the page by name.
export function addShortcuts(act) {
  $("shortcuts").replaceChildren(...LISTED.flatMap(([keys, does]) => [make("dt", {}, make("kbd", {}, keys)), make("dd", {}, does)]));
  const withAlt = {
    KeyN: act.newChat, KeyR: act.retryLast, KeyC: act.copyLast, KeyT: act.nextTheme,
    ArrowLeft: () => act.stepVariant(-1), ArrowRight: () => act.stepVariant(1),
  };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented) return;
    const { key, code, altKey, ctrlKey, metaKey, shiftKey, target } = event;
    const isField = target.matches?.("input, textarea, select");
    let run = null;
    if (key === "Escape" && !document.querySelector("dialog[open]")) run = act.stop;
    else if ((ctrlKey || metaKey) && !altKey && !shiftKey && key.toLowerCase() === "k") run = act.search;
    else if (altKey && !ctrlKey && !metaKey && !shiftKey && !(isField && target.value && code.startsWith("Arrow"))) run = withAlt[code];
    else if (key === "?" && !isField && !ctrlKey && !metaKey) run = act.help;
    if (!run) return;
    if (key !== "Escape") event.preventDefault();
    run();
  });
}
