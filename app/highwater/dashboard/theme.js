/* Before the first paint, so that nothing flashes: the colours chosen last time, else the system's. A classic script. */
"use strict";
globalThis.theme = {
  chosen: "",
  system: matchMedia("(prefers-color-scheme: dark)"),
  apply() {
    document.documentElement.toggleAttribute("data-dark", this.chosen ? this.chosen === "dark" : this.system.matches);
  },
};
try {
  theme.chosen = localStorage.getItem("highwater-theme") ?? "";
} catch {
  // No storage in this browser: the system's colours.
}
theme.apply();
