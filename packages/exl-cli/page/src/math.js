// Mathematics in Markdown: $…$, $$…$$, \(…\) and \[…\], rendered by KaTeX as elements.

import { __renderToDomTree as renderToDomTree } from "katex";

const MOST_CHARS = 10_000;
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false]];
const OPTIONS = {
  throwOnError: true, strict: "ignore", trust: false, maxSize: 30, maxExpand: 300, output: "htmlAndMathml",
};

// Adds the two rules to a markdown-it parser. Their tokens are `math_inline` and `math_block`.
export function addMath(parser) {
  parser.inline.ruler.before("escape", "math_inline", inlineRule);
  const alt = ["paragraph", "blockquote", "list"];
  parser.block.ruler.after("fence", "math_block", blockRule, { alt });
}

function inlineRule(state, isSilent) {
  const found = inlineAt(state.src, state.pos, state.posMax);
  if (!found) return false;
  if (!isSilent) {
    const token = state.push("math_inline", "", 0);
    Object.assign(token, { content: found.tex, markup: found.source, meta: { isDisplay: found.isDisplay } });
  }
  state.pos += found.source.length;
  return true;
}

function inlineAt(text, at, end) {
  for (const [opening, closing, isDisplay] of PAIRS) {
    if (!text.startsWith(opening, at)) continue;
    const inside = text.slice(at + opening.length, Math.min(end, at + MOST_CHARS));
    const size = inside.indexOf(closing);
    if (size < 0 || !inside.slice(0, size).trim()) return null;
    const source = text.slice(at, at + opening.length + size + closing.length);
    return { tex: inside.slice(0, size), source, isDisplay };
  }
  return text[at] === "$" ? dollarsAt(text, at, end) : null;
}

// $…$ as Pandoc reads it, so that prices stay text: no space inside the dollars, and no digit behind.
function dollarsAt(text, at, end) {
  let to = at + 1;
  const limit = Math.min(end, at + MOST_CHARS);
  while (to < limit && text[to] !== "$") to += text[to] === "\\" ? 2 : 1;
  const tex = text.slice(at + 1, to);
  const isMath = to < limit && tex && !/^\s|\s$|\n\s*\n/.test(tex) && !/\d/.test(text[to + 1] ?? "");
  return isMath ? { tex, source: text.slice(at, to + 1), isDisplay: false } : null;
}

// A formula whose delimiters begin and end lines.
function blockRule(state, startLine, endLine, isSilent) {
  const lineAt = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = lineAt(startLine);
  const pair = PAIRS.find(([opening, , isDisplay]) => isDisplay && first.startsWith(opening));
  if (!pair) return false;
  const [opening, closing] = pair, lines = [first.slice(opening.length)];
  let last = startLine, chars = 0;
  while (!lines.at(-1).trimEnd().endsWith(closing)) {
    last += 1;
    if (last >= endLine || state.sCount[last] < state.blkIndent || chars > MOST_CHARS) return false;
    const line = lineAt(last);
    if (line.startsWith(opening) && opening !== closing) return false; // also bounds the search
    lines.push(line);
    chars += line.length + 1;
  }
  const content = lines.join("\n").trimEnd().slice(0, -closing.length);
  if (!content.trim() || content.includes(closing)) return false;
  if (isSilent) return true;
  state.line = last + 1;
  const token = state.push("math_block", "", 0);
  Object.assign(token, { block: true, content, markup: opening, map: [startLine, state.line] });
  return true;
}

// Element of a formula. A formula that KaTeX cannot read is shown as it is written.
export function mathElement(tex, source, isDisplay) {
  let shown;
  try {
    const tree = renderToDomTree(tex, { ...OPTIONS, displayMode: isDisplay });
    withoutStyleAttributes(tree);
    shown = tree.toNode();
  } catch {
    shown = document.createElement("code");
    shown.textContent = source;
  }
  if (!isDisplay) return shown;
  const box = document.createElement("div");
  box.className = "math";
  box.tabIndex = 0;
  box.append(shown);
  return box;
}

// The page's policy blocks style attributes that are set as text, and allows the same declarations
// through an element's `style`.
function withoutStyleAttributes(node) {
  for (const child of node.children ?? []) withoutStyleAttributes(child);
  const declared = node.attributes?.style;
  if (!declared) return;
  delete node.attributes.style;
  const toNode = node.toNode.bind(node);
  node.toNode = () => {
    const element = toNode();
    element.style.cssText = declared;
    return element;
  };
}
