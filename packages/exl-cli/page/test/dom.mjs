// A document without a browser, for the modules that build elements. Import it before them.

import { parseHTML } from "linkedom";

const { document } = parseHTML("<!doctype html><html><body></body></html>");
Object.defineProperty(document, "compatMode", { value: "CSS1Compat" }); // KaTeX warns otherwise
globalThis.document = document;
