// The model of the page: its choice, its loading, and its description.

import { $, make } from "./elements.js";
import { KeyError, ServerError } from "./server.js";

const POLL_MS = 1000;

export class Models {
  // `onChange` is called when the models are listed anew. `onProblem` receives a message, or "".
  constructor(server, { onChange, onProblem }) {
    this.server = server;
    this.listed = [];
    this.chosen = "";
    this.loading = "";
    this.onChange = onChange;
    this.onProblem = onProblem;
    $("model").addEventListener("change", () => this.choose($("model").value));
  }

  // The model that a request names: none if there is only one.
  get requested() {
    return this.listed.length > 1 ? this.chosen : "";
  }

  get shown() {
    return this.listed.find((one) => one.id === this.chosen) ?? this.listed[0];
  }

  // Is the chosen model one that the server has yet to load?
  get isOther() {
    return this.shown?.loaded === false;
  }

  async list() {
    try {
      this.listed = await this.server.models();
      if (!this.listed.some((one) => one.id === this.chosen)) {
        this.chosen = (this.listed.find((one) => one.loaded) ?? this.listed[0])?.id ?? "";
      }
      $("key").hidden = true;
      this.onProblem("");
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (error instanceof KeyError) this.askForKey();
      this.onProblem(error.message);
    }
    this.show();
    this.onChange();
  }

  askForKey() {
    $("key").hidden = false;
    $("key-input").focus();
  }

  show() {
    const names = this.listed.map((one) => one.id);
    $("model").replaceChildren(...names.map((name) => make("option", {}, name)));
    $("model").value = this.chosen;
    $("model").hidden = names.length < 2;
    $("name").hidden = names.length > 1;
    $("name").textContent = names[0] ?? "";
    $("loading").textContent = this.loading ? `Loading ${this.loading}…` : "";
  }

  // Selects a model, and has the server load it.
  async choose(name) {
    this.chosen = name;
    this.onChange();
    if (!this.isOther) return this.show();
    this.loading = name;
    this.show();
    try {
      await this.server.load(name);
      if (this.chosen === name) await this.list();
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (this.chosen === name) this.onProblem(error.message);
    }
    if (this.loading === name) this.loading = "";
    this.show();
  }

  // Says "Loading" while a reply waits for its model. Returns a function that ends this.
  watch() {
    if (!this.isOther || this.loading) return () => {};
    const name = this.loading = this.chosen;
    this.show();
    return () => {
      if (this.loading !== name) return;
      this.loading = "";
      this.show();
      setTimeout(() => this.list(), POLL_MS);
    };
  }
}

// One line on a listed model: architecture, size, context, device.
export function aboutModel(model) {
  if (!model) return "";
  const parts = [];
  if (model.architecture) parts.push(model.architecture);
  if (model.weights_bytes) parts.push(`${sizeOf(model.weights_bytes)} of weights`);
  if (model.max_model_len) parts.push(`context of ${model.max_model_len.toLocaleString("en")} tokens`);
  if (model.device) parts.push(`on ${model.device === "cpu" ? "the CPU" : "the GPU"}`);
  if (model.loaded === false) parts.push("not loaded yet");
  return parts.join(" · ");
}

export function sizeOf(bytes) {
  const [unit, one] = bytes >= 1e9 ? ["GB", 1e9] : ["MB", 1e6];
  return `${(bytes / one).toPrecision(bytes / one >= 100 ? 3 : 2)} ${unit}`;
}
