// Elements of the page: those that it has, and new ones.

export function part(id) {
  return document.getElementById(id);
}

export function element(name, style = "", text = "") {
  const made = document.createElement(name);
  made.className = style;
  made.textContent = text;
  return made;
}
