/* Before the first paint, so that nothing flashes: the colours chosen last time. A classic script for that reason. */
"use strict";
try {
  const chosen = localStorage.getItem("highwater-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage in this browser: the system's colours.
}
