// Builds the chat page: one HTML file with its script, its styles and KaTeX's fonts.
//
//   node build.mjs [FILE]     default: ../src/exl_cli/server/page.html
//
// The file begins with a hash of its sources, which a test compares (tests/server/test_page_build.py).

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../src/exl_cli/server/page.html");
const LIBRARIES = ["markdown-it", "linkify-it", "mdurl", "entities", "uc.micro", "punycode.js", "highlight.js", "katex"];

function sourceHash() {
  const names = ["build.mjs", "package-lock.json", ...readdirSync(join(here, "src")).sort().map((name) => `src/${name}`)];
  const hash = createHash("sha256");
  for (const name of names) hash.update(`${name}\n`).update(readFileSync(join(here, name))).update("\n");
  return hash.digest("hex");
}

function licenses() {
  const parts = LIBRARIES.map((name) => {
    const folder = join(here, "node_modules", name);
    const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
    return `${name} ${version}\n\n${readFileSync(join(folder, file), "utf8").trim()}`;
  });
  return parts.join(`\n\n${"-".repeat(72)}\n\n`);
}

// KaTeX's style sheet with its fonts as WOFF2 only, which every browser with this page's features reads.
const fonts = {
  name: "fonts",
  setup(bundler) {
    bundler.onLoad({ filter: /katex\.css$/ }, ({ path }) => {
      const text = readFileSync(path, "utf8");
      const contents = text.replace(/,\s*url\([^)]*\.(?:woff|ttf)\) format\("[a-z]+"\)/g, "");
      return { contents, loader: "css", resolveDir: dirname(path) };
    });
  },
};

async function bundled(entry) {
  const { outputFiles } = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    charset: "utf8",
    legalComments: "none",
    format: entry.endsWith(".js") ? "iife" : undefined,
    target: ["chrome109", "firefox115", "safari16"],
    loader: { ".woff2": "dataurl" },
    plugins: [fonts],
    logLevel: "warning",
  });
  return outputFiles[0].text.trim();
}

const script = (await bundled("src/main.js")).replace(/<(?=\/script|!--)/gi, "\\x3C");
const style = await bundled("src/style.css");
const escaped = licenses().replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const parts = { SOURCES: sourceHash(), STYLE: style, SCRIPT: script, LICENSES: escaped };
const template = readFileSync(join(here, "src/page.html"), "utf8");
writeFileSync(out, template.replace(/\{\{([A-Z]+)\}\}/g, (_, name) => parts[name]));
