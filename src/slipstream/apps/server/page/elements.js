// Makes elements of the page without parsing any markup.

// An element: h("p.hint", { role: "status" }, ...children). Attributes may be left out; those that are functions become
// event listeners.
export function h(name, attributes, ...children) {
	const [tag, ...classes] = name.split(".");
	const node = document.createElement(tag);
	if (attributes?.constructor !== Object) children.unshift(attributes);
	else for (const [key, value] of Object.entries(attributes)) {
		if (typeof value === "function") node.addEventListener(key, value);
		else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
	}
	if (classes.length) node.className = classes.join(" ");
	node.append(...children.filter((child) => child != null));
	return node;
}

export function svg(tag, attrs, ...children) {
	const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, value);
	node.append(...children);
	return node;
}
