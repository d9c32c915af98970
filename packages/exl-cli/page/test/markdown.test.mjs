import "./dom.mjs";

import assert from "node:assert/strict";
import { test } from "node:test";

const { showMarkdown } = await import("../src/markdown.js");

function shown(text) {
  const box = document.createElement("div");
  showMarkdown(box, text);
  return box;
}

const textsOf = (box, selector) => [...box.querySelectorAll(selector)].map((one) => one.textContent);

test("blocks and inline parts", () => {
  const box = shown("# Head\n\nSome **bold**, *it* and `co<de`, ~~gone~~\nnext.\n\n- one\n  - inner\n- two\n\n3. three\n\n> quoted\n\n---");
  assert.deepEqual([...box.children].map((one) => one.tagName), ["H2", "P", "UL", "OL", "BLOCKQUOTE", "HR"]);
  assert.deepEqual(["strong", "em", "code", "del", "li li"].map((one) => textsOf(box, one)[0]), ["bold", "it", "co<de", "gone", "inner"]);
  assert.equal(box.querySelector("ol").getAttribute("start") ?? box.querySelector("ol").start, 3);
  assert.ok(box.querySelector("p").textContent.endsWith("gone\nnext."));
  assert.equal(box.querySelectorAll("ul > li > p").length, 0);
});

test("tables with sides, and cells that hold markup", () => {
  const box = shown("| a | *b* | `c\\|d` |\n|:--|:-:|--:|\n| 1 | <b>x</b> | 3 | 4 |\n| 2 |");
  assert.deepEqual(textsOf(box, "th"), ["a", "b", "c|d"]);
  assert.deepEqual(textsOf(box, "td"), ["1", "<b>x</b>", "3", "2", "", ""]);
  assert.deepEqual([...box.querySelectorAll("th")].map((one) => one.className), ["", "center", "right"]);
  assert.equal(box.firstElementChild.className, "table");
});

test("task lists", () => {
  const box = shown("- [x] done\n- [ ] open *now*\n- [y] text\n\n1. [X]\n");
  const inputs = [...box.querySelectorAll("input")];
  assert.deepEqual(inputs.map((one) => [one.type, one.disabled, one.checked]), [
    ["checkbox", true, true], ["checkbox", true, false], ["checkbox", true, true],
  ]);
  assert.deepEqual(textsOf(box, "ul li"), ["done", "open now", "[y] text"]);
});

test("code is highlighted by language, and unknown languages stay text", () => {
  const box = shown("```python\ndef f(x):\n    return \"<b>\"  # note\n```\n\n```nonsense\n<i>\n```\n\n    indented");
  const codes = textsOf(box, "pre code");
  assert.deepEqual(codes, ["def f(x):\n    return \"<b>\"  # note", "<i>", "indented"]);
  assert.deepEqual(textsOf(box, ".hljs-keyword"), ["def", "return"]);
  assert.deepEqual(textsOf(box, ".hljs-string"), ["\"<b>\""]);
  assert.deepEqual(textsOf(box, ".code .faint"), ["python", "nonsense", "code"]);
});

test("an unfinished code block is shown as code", () => {
  assert.deepEqual(textsOf(shown("Look:\n```js\nlet a"), "pre code"), ["let a"]);
});

test("formulas in all four delimiters, and in code blocks", () => {
  const box = shown("Inline $a^2$ and \\(b\\).\n\n$$\n\\frac{1}{2}\n$$\n\n\\[ c \\]\n\n```math\nd\n```\n- $e$\n  $$f$$");
  assert.equal(box.querySelectorAll(".katex").length, 7);
  assert.equal(box.querySelectorAll(".math").length, 4);
  assert.deepEqual(textsOf(box, "annotation").map((one) => one.trim()), ["a^2", "b", "\\frac{1}{2}", "c", "d", "e", "f"]);
});

test("prices and lone delimiters are text", () => {
  for (const text of ["It costs $5 or $10.", "$ a $", "a $ b", "$$", "\\( open", "$x$5", "\\$a$", "`$a$`"]) {
    const box = shown(text);
    assert.equal(box.querySelectorAll(".katex").length, 0, text);
  }
  assert.equal(shown("It costs $5 or $10.").textContent, "It costs $5 or $10.");
});

test("a formula that cannot be read is shown as it is written", () => {
  assert.equal(shown("$\\frac{1}$").textContent, "$\\frac{1}$");
  assert.equal(shown("a $\\def\\x{\\x\\x}\\x$").querySelectorAll(".katex").length, 0);
});

const PAYLOADS = [
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(1)>",
  "<svg/onload=alert(1)>",
  "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
  "<a href=\"javascript:alert(1)\">x</a>",
  "[x](javascript:alert(1))",
  "[x](JaVaScRiPt:alert(1))",
  "[x](java&#115;cript:alert(1))",
  "[x](data:text/html;base64,PHNjcmlwdD4=)",
  "[x](vbscript:msgbox(1))",
  "[x](\u0001javascript:alert(1))",
  "[x](//evil.example)",
  "<javascript:alert(1)>",
  "[a]: javascript:alert(1)\n\n[a]",
  "![x](https://evil.example/p.png \"t\")",
  "![x](javascript:alert(1))",
  "![<img src=x onerror=alert(1)>](x)",
  "```\"><img src=x onerror=alert(1)>\nx\n```",
  "```html\n<script>alert(1)</script>\n```",
  "`<img src=x onerror=alert(1)>`",
  "$\\href{javascript:alert(1)}{x}$",
  "$\\htmlStyle{background:url(//evil.example)}{x}$",
  "$\\htmlData{a=b}{x} \\htmlClass{c}{x} \\htmlId{send}{x}$",
  "$\\includegraphics{https://evil.example/p.png}$",
  "$\\url{javascript:alert(1)}$",
  "$\\text{<img src=x onerror=alert(1)>}$",
  "| a |\n|:-|\n| <img src=x onerror=alert(1)> |",
  "- [x] <img src=x onerror=alert(1)>",
  "&lt;img src=x onerror=alert(1)&gt;",
  "<style>*{display:none}</style>",
  "<form action=//evil.example><button>x</button></form>",
  "<math><mtext><style><img src=x onerror=alert(1)></style></mtext></math>",
];
const ALLOWED = new Set(("div p span a code pre button em strong del h2 h3 h4 ul ol li blockquote table thead tbody tr th td hr br input "
  + "math semantics mrow mi mo mn mtext mstyle annotation svg path line mspace mfrac msup msub mpadded menclose").split(" "));

for (const payload of PAYLOADS) {
  test(`harmless: ${payload.slice(0, 50)}`, () => {
    for (const element of shown(payload).querySelectorAll("*")) {
      const tag = element.localName;
      assert.ok(ALLOWED.has(tag), tag);
      for (const { name, value } of element.attributes) {
        assert.ok(!name.startsWith("on") && !["src", "srcdoc", "action", "id", "xlink:href"].includes(name), `${tag} ${name}`);
        if (name === "href") assert.match(value, /^(https?|mailto):/);
      }
      if (element.href) assert.match(String(element.href), /^(https?|mailto):/);
    }
  });
}

test("links open elsewhere and tell nothing", () => {
  const [link, bare] = shown("[good](https://example.com/a) https://example.com/b example.com").querySelectorAll("a");
  assert.deepEqual([link.href, link.target, link.rel], ["https://example.com/a", "_blank", "noopener noreferrer"]);
  assert.equal(bare.href, "https://example.com/b");
});

test("blocks that stay the same keep their elements", () => {
  const box = shown("# One\n\ntwo");
  const [head, second] = box.children;
  showMarkdown(box, "# One\n\ntwo and more\n\nthree");
  assert.equal(box.children[0], head);
  assert.notEqual(box.children[1], second);
  assert.equal(box.children.length, 3);
  showMarkdown(box, "# One");
  assert.equal(box.children.length, 1);
});

const HARMFUL = [
  "- ", "*a", "**", "`", "[", "_a ", "# ", "  - a\n    ", "```", "1. ", "http://", " \t", "|", "| -", "|\n", "-|", "> ", ">\n",
  "~~a", "|a|\n|-|\n", "$", "$a ", "\\(", "$$\n", "\\[a\n", "![", "[a](", "<a ", "&#", "a\n",
];

for (const piece of HARMFUL) {
  test(`in time: 20,000 times ${JSON.stringify(piece)}`, () => {
    const start = performance.now();
    shown(piece.repeat(20_000));
    assert.ok(performance.now() - start < 10_000);
  });
}
