/**
 * Colours: the components' are in components.css, those of lines in dashboard.css.
 */

const LINES = 8;

/** The colour of the nth line. */
export function lineVariable(index) {
  return `--line-${index % LINES}`;
}

/** A colour as it is in the theme in force. */
export function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

