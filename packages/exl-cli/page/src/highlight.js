// Highlighted code, as elements. highlight.js finds the parts; its HTML is not used.

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import dockerfile from "highlight.js/lib/languages/dockerfile";
import go from "highlight.js/lib/languages/go";
import haskell from "highlight.js/lib/languages/haskell";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import julia from "highlight.js/lib/languages/julia";
import kotlin from "highlight.js/lib/languages/kotlin";
import latex from "highlight.js/lib/languages/latex";
import lua from "highlight.js/lib/languages/lua";
import makefile from "highlight.js/lib/languages/makefile";
import markdown from "highlight.js/lib/languages/markdown";
import perl from "highlight.js/lib/languages/perl";
import php from "highlight.js/lib/languages/php";
import powershell from "highlight.js/lib/languages/powershell";
import python from "highlight.js/lib/languages/python";
import r from "highlight.js/lib/languages/r";
import ruby from "highlight.js/lib/languages/ruby";
import rust from "highlight.js/lib/languages/rust";
import scala from "highlight.js/lib/languages/scala";
import shell from "highlight.js/lib/languages/shell";
import sql from "highlight.js/lib/languages/sql";
import swift from "highlight.js/lib/languages/swift";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const LANGUAGES = {
  bash, c, cpp, csharp, css, diff, dockerfile, go, haskell, ini, java, javascript, json, julia, kotlin,
  latex, lua, makefile, markdown, perl, php, powershell, python, r, ruby, rust, scala, shell, sql, swift,
  typescript, xml, yaml,
};
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

const MOST_CHARS = 50_000; // longer code is shown without colors, because coloring it takes long

// Nodes of highlighted code. Code in an unknown language is one text.
export function highlighted(code, language) {
  if (!hljs.getLanguage(language) || code.length > MOST_CHARS) return [code];
  const { _emitter: emitter } = hljs.highlight(code, { language, ignoreIllegals: true });
  return emitter.rootNode.children.map(nodeOf);
}

function nodeOf(part) {
  if (typeof part === "string") return part;
  const span = document.createElement("span");
  if (part.scope) span.className = `hljs-${part.scope.split(".")[0]}`;
  span.append(...part.children.map(nodeOf));
  return span;
}
