// The list of conversations: search, rename, export, delete.

import { asMarkdown, fileName, matches, titleOf } from "./conversation.js";
import { $, button, download, make } from "./elements.js";

export class Sidebar {
  // `act`: functions of the page by name: list, open, rename, remove.
  constructor(act) {
    this.act = act;
    $("search").addEventListener("input", () => this.show());
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") $("list").querySelector("button")?.click();
    });
    $("export-all").addEventListener("click", () => {
      download("conversations.json", JSON.stringify(act.list(), null, 1), "application/json");
    });
    document.addEventListener("click", ({ target }) => {
      for (const menu of document.querySelectorAll("details.menu[open]")) {
        if (!menu.contains(target) || target.closest("div button")) menu.open = false;
      }
    });
  }

  show(currentId = this.currentId) {
    this.currentId = currentId;
    const all = this.act.list(), query = $("search").value;
    const found = all.filter((one) => matches(one, query));
    $("list").replaceChildren(...found.map((one) => this.item(one)));
    if (all.length && !found.length) $("list").append(make("li", { className: "faint" }, "Nothing found"));
    $("export-all").hidden = !all.length;
  }

  item(conversation) {
    const { act } = this, title = titleOf(conversation);
    const date = new Date(conversation.updated).toLocaleDateString(undefined, { day: "numeric", month: "short" });
    const open = button(title, () => act.open(conversation.id), { className: "open", title: `${title} · ${date}` });
    if (conversation.id === this.currentId) open.setAttribute("aria-current", "true");
    const actions = {
      Rename: () => {
        const given = prompt("Title", title);
        if (given !== null) act.rename(conversation.id, given.trim());
      },
      "Export as Markdown": () => download(fileName(conversation, "md"), asMarkdown(conversation), "text/markdown"),
      "Export as JSON": () => download(fileName(conversation, "json"), JSON.stringify(conversation, null, 1), "application/json"),
      Delete: () => { if (confirm(`Delete “${title}”?`)) act.remove(conversation.id); },
    };
    const entries = Object.entries(actions).map(([name, onClick]) => button(name, onClick));
    const summary = make("summary", {}, "⋯");
    summary.setAttribute("aria-label", `Actions for ${title}`);
    const menu = make("details", { className: "menu" }, summary, make("div", {}, ...entries));
    return make("li", {}, open, menu);
  }
}
