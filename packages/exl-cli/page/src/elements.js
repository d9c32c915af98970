// Elements of the page. Texts become text nodes; nothing is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(label, onClick, properties = {}) {
  const element = make("button", { type: "button", ...properties }, label);
  element.addEventListener("click", onClick);
  return element;
}

export async function copyText(text, shown, from) {
  const label = from.dataset.label ??= from.textContent;
  let isCopied = false;
  if (navigator.clipboard) isCopied = await navigator.clipboard.writeText(text).then(() => true, () => false);
  if (!isCopied) { // permission denied, or a page from another machine without TLS
    getSelection().selectAllChildren(shown);
    isCopied = document.execCommand("copy");
  }
  from.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => { from.textContent = label; }, 1500);
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
