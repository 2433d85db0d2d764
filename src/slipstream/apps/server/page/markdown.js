// Markdown as models write it: headings, lists, tables, quotes, code, emphasis and links, as in CommonMark and GitHub's
// tables. Text becomes elements one by one and never markup, so HTML in an answer is shown as it was written.
// Images are shown as links, since the page loads nothing from elsewhere.

import { h } from "./elements.js";

const MOST_DEPTH = 16; // of nested lists and quotes; deeper ones are shown as text
const MOST_INLINE = 8000; // characters of a paragraph that are searched for emphasis and links
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp([
	/\\([!-/:-@[-`{-~])/, // 1: an escaped character
	/(?<!`)(`+)(?!`)([\s\S]*?[^`])\2(?!`)/, // 2, 3: code
	/!?\[([^[\]]*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/, // 4, 5: a link or an image
	/<(https?:\/\/[^\s<>]+)>/, // 6: an address
	/\b(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])/, // 7: a bare address
	/(\*{1,3}|~~)(?=[^\s*~])([\s\S]*?[^\s\\*~])\8(?![*~])/, // 8, 9: emphasis
	/(?<!\w)(_{1,3})(?=[^\s_])([\s\S]*?[^\s\\_])\10(?!\w)/, // 10, 11: emphasis
].map((part) => part.source).join("|"), "g");

// The blocks of a text. codeTools: makes the buttons of a code block, which stand beside its language.
export function markdown(text, codeTools = () => null) {
	return blocks(text.replaceAll("\r\n", "\n").split("\n"), codeTools, 0);
}

function blocks(lines, codeTools, depth) {
	const nodes = [];
	let index = 0;
	while (index < lines.length) {
		const line = lines[index];
		const fence = line.match(FENCE);
		const heading = line.match(HEADING);
		const end = paragraphEnd(lines, index);
		if (!line.trim()) index += 1;
		else if (fence) {
			const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
			let last = index + 1;
			while (last < lines.length && !close.test(lines[last])) last += 1;
			nodes.push(codeBlock(fence[2], lines.slice(index + 1, last).join("\n"), codeTools));
			index = last + 1;
		} else if (heading) {
			nodes.push(h(`h${Math.min(6, heading[1].length + 3)}`, {}, ...inline(heading[2])));
			index += 1;
		} else if (RULE.test(line)) {
			nodes.push(h("hr"));
			index += 1;
		} else if (QUOTE.test(line) && depth < MOST_DEPTH) {
			let last = index;
			while (last < lines.length && QUOTE.test(lines[last])) last += 1;
			const inner = lines.slice(index, last).map((quoted) => quoted.replace(QUOTE, ""));
			nodes.push(h("blockquote", {}, ...blocks(inner, codeTools, depth + 1)));
			index = last;
		} else if (ITEM.test(line) && depth < MOST_DEPTH) {
			const [list, last] = listFrom(lines, index, codeTools, depth);
			nodes.push(list);
			index = last;
		} else if (line.includes("|") && DELIMITERS.test(lines[index + 1] ?? "") && cells(line).length === cells(lines[index + 1]).length) {
			let last = index + 2;
			while (last < lines.length && lines[last].includes("|")) last += 1;
			nodes.push(table(lines.slice(index, last)));
			index = last;
		} else {
			nodes.push(h("p", {}, ...inline(lines.slice(index, end).map((part) => part.trim()).join("\n"))));
			index = end;
		}
	}
	return nodes;
}

function paragraphEnd(lines, start) {
	let end = start + 1;
	const begins = (line) => [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line)) || /^\s*([-*+]|1[.)])\s+\S/.test(line);
	while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
	return end;
}

function codeBlock(language, code, codeTools) {
	const pre = h("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, h("code", {}, code));
	return h("div.code-block", h("div.bar", h("span.hint", {}, language || "code"), codeTools(code)), pre);
}

// The list that begins at a line, and the line after it: items with one kind of mark at one depth. Lines that are
// indented below a mark belong to its item.
function listFrom(lines, start, codeTools, depth) {
	const [, margin, mark] = lines[start].match(ITEM);
	const ordered = /\d/.test(mark);
	const items = [];
	let loose = false;
	let index = start;
	while (index < lines.length) {
		const item = lines[index].match(ITEM);
		if (!item || item[1].length > margin.length + 1 || item[1].length < margin.length) break;
		if (/\d/.test(item[2]) !== ordered || RULE.test(lines[index])) break;
		const indent = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
		const inner = [item[4]];
		index += 1;
		for (; index < lines.length; index++) {
			const line = lines[index];
			const lead = line.match(/^\s*/)[0].length;
			if (!line.trim()) {
				const next = lines.slice(index).find((later) => later.trim());
				if (!next || next.match(/^\s*/)[0].length < Math.min(indent, margin.length + 2)) break;
				inner.push("");
			} else if (lead > margin.length + 1 || lead >= indent) inner.push(line.slice(Math.min(lead, indent)));
			else if (ITEM.test(line) || [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line)) || !inner.at(-1)) break;
			else inner.push(line); // a lazy continuation
		}
		const blank = index;
		while (index < lines.length && !lines[index].trim()) index += 1;
		items.push(inner);
		const next = lines[index]?.match(ITEM);
		if (inner.slice(1, -1).includes("") || (blank < index && next && next[1].length <= margin.length + 1)) loose = true;
	}
	const content = (inner) => blocks(inner, codeTools, depth + 1)
		.flatMap((node) => (!loose && node.tagName === "P" ? [...node.childNodes] : [node]));
	const first = Number.parseInt(mark, 10);
	const list = h(ordered ? "ol" : "ul", ordered && first !== 1 ? { start: first } : {}, ...items.map((inner) => h("li", {}, ...content(inner))));
	return [list, index];
}

function cells(line) {
	return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table([head, delimiters, ...rows]) {
	const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
	const row = (kind, line) => h("tr", {}, ...sides.map((side, column) => h(kind, side ? { class: side } : {}, ...inline(cells(line)[column] ?? ""))));
	return h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table" },
		h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, ...rows.map((line) => row("td", line)))));
}

const EMPHASIS = { 1: ["em"], 2: ["strong"], 3: ["em", "strong"] };

function inline(text, depth = 0) {
	if (text.length > MOST_INLINE || depth > MOST_DEPTH) return [text];
	const nodes = [];
	let from = 0;
	for (const match of text.matchAll(INLINE)) {
		const [whole, escaped, , code, label, address, plain, bare, stars, starred, bars, barred] = match;
		nodes.push(text.slice(from, match.index));
		from = match.index + whole.length;
		if (escaped) nodes.push(escaped);
		else if (code !== undefined) nodes.push(h("code", {}, code.replace(/^ (.*) $/s, "$1").replaceAll("\n", " ")));
		else if (label !== undefined) nodes.push(link(address, label ? inline(label, depth + 1) : [address], whole));
		else if (plain ?? bare) nodes.push(link(plain ?? bare, [plain ?? bare], whole));
		else if (stars === "~~") nodes.push(h("del", {}, ...inline(starred, depth + 1)));
		else {
			const tags = EMPHASIS[(stars ?? bars).length];
			nodes.push(tags.reduce((inner, tag) => [h(tag, {}, ...inner)], inline(starred ?? barred, depth + 1))[0]);
		}
	}
	return [...nodes, text.slice(from)].filter((node) => node !== "");
}

// A link to the web or to a mail address; other addresses stay text.
function link(address, children, whole) {
	const url = URL.canParse(address) ? new URL(address) : null;
	if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return whole;
	return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
