// Markdown of replies as elements. markdown-it parses it; this module builds the elements itself, so
// that a text of the model is never parsed as HTML.

import MarkdownIt from "markdown-it";

import { button, copyText, make } from "./elements.js";
import { highlighted } from "./highlight.js";
import { addMath, mathElement } from "./math.js";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = () => true; // `linkOf` checks addresses
addMath(parser);

const TAGS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li", table: "table",
  thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td", strong: "strong", em: "em", s: "del",
};
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const TASK = /^\[([ xX])\](?=\s|$)\s*/;

// Shows `text` in `target`. Blocks that have not changed keep their elements, so that a selection
// survives while a reply streams.
export function showMarkdown(target, text) {
  const blocks = blocksOf(text);
  blocks.forEach(({ key, tokens }, i) => {
    const old = target.children[i];
    if (old?.source === key) return;
    const element = Object.assign(elementOf(tokens), { source: key });
    if (old) old.replaceWith(element);
    else target.append(element);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

// The outermost blocks with their tokens. Blocks with one key look the same.
function blocksOf(text) {
  const env = {}, lines = text.split("\n"), blocks = [];
  let begun = [];
  for (const token of parser.parse(text, env)) {
    begun.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    const [from, to] = begun[0].map ?? [0, lines.length];
    blocks.push({ key: lines.slice(from, to).join("\n"), tokens: begun });
    begun = [];
  }
  const references = JSON.stringify(env.references ?? {});
  for (const block of blocks) block.key = `${block.tokens[0].type} ${references}\n${block.key}`;
  return blocks;
}

function elementOf(tokens) {
  const box = document.createElement("div");
  addAll(box, tokens);
  return box.children.length === 1 ? box.firstElementChild : box;
}

function addAll(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const at = open.at(-1);
    if (token.nesting > 0) {
      const inner = openedBy(token);
      if (inner) at.append(inner.outer ?? inner);
      open.push(inner ?? at);
    } else if (token.nesting < 0) {
      open.pop();
    } else {
      addLeaf(at, token);
    }
  }
}

// Element that a token opens. null: none, as for the paragraphs of dense lists.
function openedBy(token) {
  const kind = token.type.replace(/_open$/, "");
  if (token.hidden) return null;
  if (kind === "link") return linkOf(token.attrGet("href"));
  if (kind === "heading") return make(`h${Math.min(Number(token.tag.slice(1)) + 1, 4)}`);
  const element = make(TAGS[kind] ?? "span");
  if (kind === "ordered_list") element.start = Number(token.attrGet("start") ?? 1);
  if (kind === "th" || kind === "td") {
    const side = /text-align:(center|right)/.exec(token.attrGet("style") ?? "");
    if (side) element.className = side[1];
  }
  if (kind === "table") {
    element.outer = make("div", { className: "table", tabIndex: 0 }, element);
    element.outer.setAttribute("role", "group");
    element.outer.setAttribute("aria-label", "Table");
  }
  return element;
}

function linkOf(address) {
  if (!SAFE_LINK.test(address)) return make("span");
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address });
}

function addLeaf(at, token) {
  switch (token.type) {
    case "inline": return addInline(at, token);
    case "fence":
    case "code_block": return at.append(codeBlock(token));
    case "math_block": return at.append(mathElement(token.content, token.content, true));
    case "math_inline": return at.append(mathElement(token.content, token.markup, token.meta.isDisplay));
    case "code_inline": return at.append(make("code", {}, token.content));
    case "hr": return at.append(make("hr"));
    case "hardbreak": return at.append(make("br"));
    case "softbreak": return at.append("\n");
    case "image": return at.append(imageLink(token));
    default: return at.append(token.content);
  }
}

function addInline(at, token) {
  const children = [...token.children], task = TASK.exec(children[0]?.type === "text" ? children[0].content : "");
  if (task && at.tagName === "LI" && !at.childNodes.length) {
    const box = make("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
    box.setAttribute("aria-label", task[1] === " " ? "open" : "done");
    at.append(box);
    at.classList.add("task");
    children[0] = Object.assign(Object.create(children[0]), { content: children[0].content.slice(task[0].length) });
  }
  addAll(at, children);
}

// A picture as a link: the page loads nothing from other sites.
function imageLink(token) {
  const address = token.attrGet("src") ?? "", link = linkOf(address);
  link.append(`🖼 ${token.content || address}`);
  return link;
}

function codeBlock(token) {
  const text = token.content.replace(/\n$/, ""), [language = ""] = token.info.trim().split(/\s+/);
  if (language === "math") return mathElement(text, text, true);
  const code = make("code", {}, ...highlighted(text, language));
  const copy = button("Copy", () => copyText(text, code, copy));
  const head = make("div", {}, make("span", { className: "faint" }, language || "code"), copy);
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}
