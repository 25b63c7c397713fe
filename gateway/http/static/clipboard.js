// The clipboard, also where the page came over plain HTTP from another machine and browsers offer no interface to it.

import { element } from "./element.js";

/** Copy a text; true if the browser let it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement, box = element("textarea");
  box.value = text;
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}
