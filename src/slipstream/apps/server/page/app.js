// The page of `slipstream serve`. What a model writes reaches the page as text and elements, never as markup.

import { h, svg } from "./elements.js";
import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
	"Explain in three sentences why the sky is blue.",
	"Write a Python function that returns the n-th Fibonacci number, then the same function with a cache.",
	"Repeat this list twice: heron, kingfisher, wagtail, dipper, osprey, bittern, grebe.",
];
const RACE_EXAMPLE = `Summarize the following notice. Use its own sentences.

The harbour office has moved the evening ferry from pier two to pier five for the whole of March. Passengers with \
bicycles must now board through the east gate, because the ramp at the west gate is being repaired. The last ferry \
leaves at 21:40 on weekdays and at 23:10 on Saturdays. Tickets bought before the change stay valid, and nobody has to \
exchange them. The office asks passengers to arrive ten minutes early during the first week.`;
const NUMBERS = {
	temperature: ["Temperature", 0, 100, false],
	top_p: ["Top p", 0, 1, false],
	max_tokens: ["Max tokens", 1, 1 << 24, true],
	seed: ["Seed", 0, Number.MAX_SAFE_INTEGER, true],
	num_draft_tokens: ["Draft tokens", 0, 64, true],
};
const FIELDS = ["system", ...Object.keys(NUMBERS), "schema", "prediction"];
const MOST_CHATS = 20;
const RACE_TOKENS = 256;

const button = (text, click, look = "") => h(`button${look}`, { type: "button", click }, text);
const on = (id, name, act) => $(id).addEventListener(name, act);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "none");
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function announce(text) {
	$("live").append(h("p", text));
	while ($("live").children.length > 5) $("live").firstChild.remove();
}

// Change the page; if the element that has a keyboard user's focus vanishes by it, `next` gets the focus.
function keepingFocus(next, change) {
	const focused = document.activeElement;
	const byKeyboard = focused.matches(":focus-visible");
	change();
	if (byKeyboard && (focused.disabled || !focused.isConnected || focused.closest("[hidden]"))) $(next).focus();
}

// Sentences reach screen readers when they are finished, tokens never.
function sentences() {
	let open = "";
	return (text, over = false) => {
		open += text;
		const finished = over ? open : (open.match(/^[\s\S]*[.!?\n]["')]?\s/)?.[0] ?? "");
		open = open.slice(finished.length);
		if (finished.trim()) announce(finished.trim());
	};
}

// ---- the server

let asking = null;

function askKey() {
	asking ??= new Promise((resolve) => {
		const dialog = $("key-dialog");
		dialog.returnValue = "";
		dialog.addEventListener("close", () => {
			asking = null;
			const entered = dialog.returnValue === "ok" ? $("key").value.trim() : "";
			if (entered) sessionStorage.setItem("slipstream.key", entered);
			$("key").value = "";
			resolve(Boolean(entered));
		}, { once: true });
		dialog.showModal();
		$("key").focus();
	});
	return asking;
}

// The server cannot be reached, or the connection broke in the middle of an answer.
class Lost extends Error {}

const GONE = "The server does not answer.";
const BROKEN = "The server went away before the answer was complete.";

async function reach(path, options, message) {
	try {
		return await fetch(path, options);
	} catch (error) {
		if (options.signal?.aborted) throw error;
		wake(); // so that the line at the top changes at once
		throw new Lost(message);
	}
}

async function call(path, body, signal) {
	for (;;) {
		const key = sessionStorage.getItem("slipstream.key");
		const headers = key ? { authorization: `Bearer ${key}` } : {};
		if (body) headers["content-type"] = "application/json";
		const method = body ? "POST" : "GET";
		const answer = await reach(path, { method, headers, signal, body: body && JSON.stringify(body) }, GONE);
		if (answer.ok) return answer;
		const refusal = await answer.json().catch(() => ({}));
		if (answer.status === 401 && (await askKey())) continue;
		const error = new Error(refusal.error?.message ?? `the server answered with status ${answer.status}`);
		error.status = answer.status;
		throw error;
	}
}

// Server-sent events, by fetch because EventSource cannot send a key.
async function* stream(path, body, signal) {
	const reader = (await call(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
	let text = "";
	try {
		for (;;) {
			const { done, value } = await reader.read().catch((error) => {
				if (signal?.aborted) throw error;
				wake();
				throw new Lost(BROKEN);
			});
			if (done) break;
			text += value;
			const events = text.split("\n\n");
			text = events.pop();
			for (const event of events) {
				if (!event.startsWith("data: ")) continue;
				if (event === "data: [DONE]") return;
				const chunk = JSON.parse(event.slice(6));
				if (chunk.error) throw new Error(chunk.error.message);
				yield chunk;
			}
		}
	} finally {
		reader.cancel().catch(() => {}); // the connection may be gone already
	}
	if (body) throw new Lost(BROKEN);
}

// ---- requests

class Refused extends Error {}

function refuse(name, message) {
	$(name).setAttribute("aria-invalid", "true");
	throw new Refused(message);
}

function number(name) {
	const [label, low, high, whole] = NUMBERS[name];
	const typed = $(name).value.trim();
	if (!typed) return undefined;
	const value = Number(typed);
	if (!(value >= low && value <= high) || (whole && !Number.isInteger(value)) || (name === "top_p" && !value)) {
		refuse(name, `${label}: ${typed}; allowed: a ${whole ? "whole " : ""}number from ${name === "top_p" ? "above 0" : low} to ${high}`);
	}
	return value;
}

function schema() {
	const typed = $("schema").value.trim();
	if (!typed) return undefined;
	try {
		return { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(typed) } };
	} catch (error) {
		return refuse("schema", `JSON schema: ${error.message}; allowed: a JSON object`);
	}
}

let model = ""; // the one that requests name, and that the engine room shows

// The page draws seeds itself, so that every receipt can be replayed: JavaScript would round the server's larger seeds.
function makeRequest(messages) {
	for (const name of FIELDS) $(name).removeAttribute("aria-invalid");
	$("settings-problem").hidden = true;
	try {
		const system = $("system").value.trim();
		const prediction = $("prediction").value;
		const request = {
			model: model || undefined,
			messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
			temperature: number("temperature"),
			top_p: number("top_p"),
			max_tokens: number("max_tokens"),
			seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
			num_draft_tokens: number("num_draft_tokens"),
			response_format: schema(),
			prediction: prediction ? { type: "content", content: prediction } : undefined,
			stream: true,
			stream_options: { include_usage: true },
			slipstream: { rounds: true },
		};
		return JSON.parse(JSON.stringify(request));
	} catch (error) {
		if (!(error instanceof Refused)) throw error;
		$("options").open = true;
		$("settings-problem").textContent = error.message;
		$("settings-problem").hidden = false;
		return null;
	}
}

function asPython(value, indent = "    ") {
	const deeper = `${indent}    `;
	if (value === null) return "None";
	if (typeof value === "boolean") return value ? "True" : "False";
	if (typeof value !== "object") return JSON.stringify(value);
	const list = Array.isArray(value);
	const items = Object.entries(value).map(([key, item]) => (list ? "" : `${JSON.stringify(key)}: `) + asPython(item, deeper));
	if (!items.length) return list ? "[]" : "{}";
	const joined = items.join(", ");
	const body = joined.length < 80 ? joined : `\n${deeper}${items.join(`,\n${deeper}`)},\n${indent}`;
	return list ? `[${body}]` : `{${body}}`;
}

function showRaw() {
	const asked = history();
	while (asked.at(-1)?.role === "assistant") asked.pop(); // shows the last request again, unless a new one is typed
	const typed = $("ask").value.trim();
	if (typed) asked.splice(0, asked.length, ...history(), { role: "user", content: typed });
	const request = makeRequest(asked.length ? asked : [{ role: "user", content: EXAMPLES[0] }]);
	if (!request) return;
	const hasKey = Boolean(sessionStorage.getItem("slipstream.key"));
	const base = new URL("v1", document.baseURI).href;
	const quoted = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
	const curl = `curl -N ${base}/chat/completions \\\n`
		+ (hasKey ? `  -H "authorization: Bearer $SLIPSTREAM_KEY" \\\n` : "")
		+ `  -H 'content-type: application/json' \\\n  -d '${quoted}'`;
	const { num_draft_tokens, slipstream, ...known } = request;
	const ours = JSON.parse(JSON.stringify({ num_draft_tokens, slipstream }));
	const options = Object.entries({ ...known, extra_body: ours }).map(([key, item]) => `    ${key}=${asPython(item)},\n`);
	const key = hasKey ? `os.environ["SLIPSTREAM_KEY"]` : `"none"`;
	const python = `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(base)}, `
		+ `api_key=${key})\nchunks = client.chat.completions.create(\n`
		+ `${options.join("")})\nfor chunk in chunks:\n    if chunk.choices:\n`
		+ `        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
	const part = (name, code) => [h("div.bar", h("h3", name), copyButton(() => code)), h("pre", { tabindex: "0" }, code)];
	$("raw-body").replaceChildren(...part("curl", curl), ...part("Python", python));
	$("raw-dialog").showModal();
}

function copyButton(text) {
	const copy = async ({ currentTarget }) => {
		const copied = (async () => navigator.clipboard.writeText(text()))(); // plain HTTP has no clipboard
		currentTarget.textContent = await copied.then(() => "Copied", () => "Not allowed by the browser");
		await pause(1500);
		currentTarget.textContent = "Copy";
	};
	return button("Copy", copy, ".quiet");
}

function download(name, value) {
	const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
	h("a", { href: url, download: name }).click();
	setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// ---- answers

// A text with visible spaces, tabs and line ends.
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
// Whether a token has no text of its own, such as a part of a character.
const broken = (text) => !text || text.includes("\ufffd") || text.startsWith("token_id:");
// The class of a token: its origin, or "prediction".
const kind = (seg) => (seg.origin === "accepted" && seg.source === "prediction" ? "prediction" : seg.origin);
const meaning = (name) => document.querySelector(`.legend .${name}`)?.parentNode.textContent.replace(" ", ": ") ?? "";

// Folds the chunks of a stream. segs: the text cut into tokens; what the server sends as text is never changed.
class Answer {
	text = "";
	thought = 0; // characters of the text that are the model's thought
	segs = [];
	rounds = [];
	ids = [];
	finish = null;
	receipt = null;
	#open = "";
	#placed = 0; // characters
	#held = [];

	take(chunk) {
		const choice = chunk.choices?.[0];
		const { content = "", reasoning_content: thought = "" } = choice?.delta ?? {};
		const report = chunk.slipstream;
		const begins = content && this.thought && this.text.length === this.thought;
		const added = thought + (begins || (thought && content) ? "\n\n" : "");
		this.thought += added.length;
		this.text += added + (content ?? "");
		this.#open += added + (content ?? "");
		if (report?.round) {
			const kept = report.tokens.slice(0, report.round.accepted).map((token) => token.text);
			this.rounds.push({ ...report.round, kept, cells: report.tokens.map(kind) });
			this.ids.push(...report.tokens.map((token) => token.id));
			this.#held.push(...report.tokens.map((token) => ({ ...token, round: this.rounds.length - 1 })));
		}
		this.receipt = report?.receipt ?? this.receipt;
		this.finish = choice?.finish_reason ?? this.finish;
		return this.#place(this.finish !== null);
	}

	end() {
		return this.#place(true);
	}

	get drafts() {
		return ["drafted", "accepted"].map((name) => this.rounds.reduce((sum, round) => sum + round[name], 0));
	}

	// Assign the text to tokens. A token that is part of a character or has no text joins the next one found in the text.
	#place(over) {
		const placed = [];
		const held = this.#held;
		while (this.#open && (held.length || over)) {
			const first = held[0]?.text ?? "";
			let count = 1;
			let text = [first, ` ${first}`, first.trimStart()].find((candidate) => !broken(candidate) && this.#open.startsWith(candidate));
			if (!text) {
				let position = -1;
				for (; count < held.length && position < 0; count++) position = broken(held[count].text) ? -1 : this.#open.indexOf(held[count].text);
				if (position >= 0) count -= 1;
				else if (!over && held.length < 12) break;
				text = position >= 0 ? this.#open.slice(0, position) : this.#open;
			}
			const { origin = "unknown", source, round = -1 } = held[0] ?? {};
			held.splice(0, Math.max(count, 1));
			this.#open = this.#open.slice(text.length);
			if (text) placed.push({ text, origin, source, round, thought: this.#placed < this.thought });
			this.#placed += text.length;
		}
		this.segs.push(...placed);
		return placed;
	}
}

function showTip(near, ...children) {
	const tip = $("tip");
	tip.replaceChildren(...children);
	tip.hidden = false;
	const rect = near.getClientRects()[0] ?? near.getBoundingClientRect();
	const { width, height } = tip.getBoundingClientRect();
	const left = Math.max(8, Math.min(rect.left, innerWidth - width - 8));
	const above = rect.top - height - 8;
	tip.style.left = `${left}px`;
	tip.style.top = `${above > 8 ? above : rect.bottom + 8}px`;
}

function aboutRound(round) {
	if (!round) return [];
	const time = Object.values(round.seconds).reduce((sum, part) => sum + part, 0) * 1000;
	const codes = (name, texts) => (texts.length ? h("div", `${name}: `, ...texts.flatMap((text) => [h("code", visible(text)), " "])) : null);
	const counts = round.drafted ? `drafted ${round.drafted}${round.source ? ` by ${round.source}` : ""}, accepted ${round.accepted}` : "nothing drafted";
	return [
		h("div", `Round ${round.index + 1}: ${counts}, ${time.toFixed(1)} ms`),
		codes("Draft", [...round.kept, ...round.rejected]),
		codes("Rejected", round.rejected),
	].filter(Boolean);
}

// An answer on the page: its tokens, and the ticker of its rounds.
class AnswerView {
	#selected = -1;

	constructor(answer) {
		this.answer = answer;
		this.node = h("div.answer", {
			tabindex: "0", role: "group", "aria-label": "Answer; arrow keys walk through its tokens",
			pointerover: (event) => event.target !== this.node && this.#show([...this.node.children].indexOf(event.target)),
			pointerleave: () => this.#hide(), blur: () => this.#hide(), keydown: (event) => this.#key(event),
		});
		this.ticker = h("div.ticker", {
			tabindex: "0", role: "group", "aria-label": "Rounds, oldest first",
			pointerover: (event) => this.#showRound(event.target.closest(".round")),
			pointerleave: () => this.#hide(), blur: () => this.#hide(),
		});
		this.add(answer.segs);
	}

	add(segs) {
		this.node.append(...segs.map((seg) => h(`span.t.${kind(seg)}${seg.thought ? ".thought" : ""}`, {
			"data-round": seg.round, "data-rejected": seg.origin === "recovered" ? this.#rejected(seg.round) : null,
		}, seg.text)));
		while (this.ticker.children.length < this.answer.rounds.length) this.#tick(this.answer.rounds[this.ticker.children.length]);
	}

	// The draft tokens that the target rejected: shown struck through, and no part of the text.
	#rejected(round) {
		return this.answer.rounds[round]?.rejected.filter((text) => !broken(text)).join("").replaceAll("\n", "↵") || null;
	}

	#tick(round) {
		const cells = [...round.cells, ...round.rejected.map(() => "missed")];
		this.ticker.append(h(cells.length > 12 ? "div.round.tall" : "div.round", ...cells.map((name) => h(`span.cell.${name}`))));
		this.ticker.scrollLeft = this.ticker.scrollWidth;
	}

	#mark(round) {
		for (const span of this.node.children) span.classList.toggle("same", Number(span.dataset.round) === round);
		[...this.ticker.children].forEach((node, index) => node.classList.toggle("on", index === round));
	}

	#show(index, spoken = false) {
		const node = this.node.children[index];
		if (!node) return;
		this.node.children[this.#selected]?.classList.remove("on");
		this.#selected = index;
		const seg = this.answer.segs[index];
		this.#mark(seg.round);
		if (spoken) {
			node.classList.add("on");
			node.scrollIntoView({ block: "nearest" });
		}
		showTip(node, h("div", h("code", visible(seg.text))), h("div", meaning(kind(seg))),
			...aboutRound(this.answer.rounds[seg.round]));
		if (spoken) announce([...$("tip").children].map((line) => line.textContent).join(". "));
	}

	#showRound(node) {
		if (!node) return;
		const index = [...this.ticker.children].indexOf(node);
		this.#mark(index);
		showTip(node, ...aboutRound(this.answer.rounds[index]));
	}

	#hide() {
		$("tip").hidden = true;
		this.node.children[this.#selected]?.classList.remove("on");
		this.#mark(-2);
	}

	#key(event) {
		const last = this.node.children.length - 1;
		const to = { ArrowRight: this.#selected + 1, ArrowLeft: this.#selected - 1, Home: 0, End: last }[event.key];
		if (to === undefined || last < 0) return;
		event.preventDefault();
		this.#show(Math.max(0, Math.min(last, to)), true);
	}
}

// What the shapes in the ticker mean, of those that it has.
function tickerKey(answer) {
	const shown = new Set(answer.rounds.flatMap((round) => [...round.cells, ...round.rejected.map(() => "missed")]));
	return h("p.key", ...[...shown].map((name) => h("span", h(`i.cell.${name}`), name === "missed" ? "rejected" : name)));
}

function facts(answer, ms) {
	const [drafted, accepted] = answer.drafts;
	const tokens = answer.ids.length;
	const predicted = answer.segs.filter((seg) => kind(seg) === "prediction").length;
	if (!tokens) return [];
	const fact = (value, name) => h("span", h("b", value), ` ${name}`);
	const { stats, params } = answer.receipt ?? {};
	return [
		fact(tokens, "tokens"),
		fact(answer.rounds.length, "forwards"),
		fact((tokens / (answer.rounds.length || 1)).toFixed(2), "tokens per forward"),
		drafted ? fact(percent(accepted, drafted), "of the draft accepted") : null,
		predicted ? fact(predicted, "from the prediction") : null,
		ms ? fact(((1000 * tokens) / ms).toFixed(1), "tokens per second") : null,
		drafted && stats?.estimated_speed_up ? h("span", "about ", h("b", `${stats.estimated_speed_up.toFixed(1)}×`), " plain decoding") : null,
		params?.temperature ? h("span", "seed ", h("b", params.seed)) : null,
	].filter(Boolean);
}

function seal(good, title, text, times) {
	const path = good ? "M14 25l7 7 14-15" : "M17 17l14 14M31 17L17 31";
	const mark = svg("svg", { viewBox: "0 0 48 48", "aria-hidden": "true" },
		svg("circle", { class: "rim", cx: 24, cy: 24, r: 21 }), svg("path", { d: path }));
	return h(good ? "div.seal" : "div.seal.bad", mark, h("div", h("strong", title), h("p", text)),
		times && h("div.times", times, h("small", "as fast as plain, one run each")));
}

function receiptNode(message) {
	const { receipt, request } = message;
	const [drafted, accepted] = message.answer.drafts;
	const result = h("div", { role: "status" });
	const rows = {
		model: receipt.model, fingerprint: receipt.fingerprint, seed: request.seed, tokens: receipt.token_ids.length,
		rounds: receipt.rounds, acceptance: drafted ? `${accepted} of ${drafted}, ${percent(accepted, drafted)}` : "nothing drafted",
		prompt: `sha256 ${receipt.prompt_token_ids_sha256.slice(0, 12)}`,
		"a seed repeats its text": receipt.reproducible ? "yes" : "not promised",
	};
	const replayPlainly = async ({ currentTarget }) => {
		if (currentTarget.ariaDisabled) return;
		currentTarget.ariaDisabled = "true"; // a disabled button would lose the focus
		result.replaceChildren("Replaying without drafts ...");
		try {
			const outcome = await (await call("v1/slipstream/replay", { request, token_ids: receipt.token_ids, seed: request.seed })).json();
			message.replay = outcome;
			result.replaceChildren(outcome.identical
				? seal(true, "Identical", `${receipt.token_ids.length} tokens again without drafts, in ${seconds(1000 * outcome.seconds)} instead of ${seconds(message.ms)}: the same.`,
					`${((1000 * outcome.seconds) / message.ms).toFixed(2)}×`)
				: seal(false, "Different", `The first difference is at token ${outcome.first_difference + 1}.`));
		} catch (error) {
			result.replaceChildren(h("p.problem", error.message));
		}
		currentTarget.ariaDisabled = null;
	};
	const keep = () => download(`receipt-${receipt.fingerprint}-${request.seed}.json`, {
		receipt, request, text: message.text, replay: message.replay ?? null,
	});
	return h("details.receipt", h("summary", "Receipt"),
		h("dl", ...Object.entries(rows).flatMap(([name, value]) => [h("dt", name), h("dd", String(value))])),
		h("div.bar", button("Replay plainly", replayPlainly),
			button("Download JSON", keep)), result);
}

// Lines by their longest common subsequence (Hunt and McIlroy, 1976): [" " | "−" | "+", line].
function lineDiff(before, after) {
	const [a, b] = [before.split("\n"), after.split("\n")];
	if (a.length * b.length > 4e6) return null;
	const common = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
	for (let i = a.length - 1; i >= 0; i--)
		for (let j = b.length - 1; j >= 0; j--)
			common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
	const lines = [];
	let [i, j] = [0, 0];
	while (i < a.length || j < b.length) {
		if (i < a.length && j < b.length && a[i] === b[j]) lines.push([" ", a[i++], j++]);
		else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) lines.push(["−", a[i++]]);
		else lines.push(["+", b[j++]]);
	}
	return lines;
}

function diffNode(prediction, text) {
	const lines = lineDiff(prediction.trim(), text.trim());
	const tags = { " ": "span", "−": "del", "+": "ins" };
	const body = lines
		? h("pre", { tabindex: "0" }, ...lines.map(([sign, line]) => h(tags[sign], {}, `${sign} ${line}`)))
		: h("p", "These texts are too long to be compared line by line.");
	const same = lines?.filter(([sign]) => sign === " ").length ?? "some";
	const title = `Difference to the prediction: ${same} of ${text.trim().split("\n").length} lines are the same`;
	return h("details.diff", { open: true }, h("summary", title), body);
}

// ---- chat

let chats = [];
let chat = null;
let running = null;

function readStore(name, otherwise) {
	try {
		return JSON.parse(localStorage.getItem(name)) ?? otherwise;
	} catch {
		return otherwise; // somebody else's value, or an incomplete one
	}
}

function writeStore(name, value) {
	try {
		localStorage.setItem(name, JSON.stringify(value));
		return true;
	} catch {
		return false; // it is full
	}
}

// Another tab may have saved other chats: they are read again before they are written.
function save(own = chat) {
	const others = readStore("slipstream.chats", []).filter((other) => other.id !== own.id);
	chats = own.messages.length ? [own, ...others] : others;
	chats.length = Math.min(chats.length, MOST_CHATS);
	while (!writeStore("slipstream.chats", chats) && chats.length) chats.pop(); // the oldest makes room
	listChats();
}

const nameOf = (entry) => entry.name || entry.messages[0]?.text.slice(0, 40) || "New chat";

function listChats() {
	const all = chats.some((entry) => entry.id === chat.id) ? chats : [chat, ...chats];
	const wanted = $("find").value.trim().toLowerCase();
	const texts = (entry) => [nameOf(entry), ...entry.messages.map((message) => message.text)].join("\n").toLowerCase();
	const found = all.filter((entry) => texts(entry).includes(wanted));
	const options = found.map((entry) => h("option", { value: entry.id, selected: entry.id === chat.id }, nameOf(entry)));
	if (!found.some((entry) => entry.id === chat.id)) options.unshift(h("option", { value: "", selected: true }, `${found.length} found`));
	$("chats").replaceChildren(...options);
}

function openChat(saved) {
	running?.abort();
	chat = saved ?? { id: crypto.randomUUID?.() ?? String(Math.random()), messages: [] };
	listChats();
	showChat();
}

function showChat() {
	keepingFocus("ask", () => {
		$("messages").replaceChildren(...chat.messages.map((message) => (message.role === "user" ? userNode(message) : answerNode(message).node)));
		$("hello").hidden = chat.messages.length > 0;
	});
}

const history = (until = chat.messages.length) => chat.messages.slice(0, until)
	.map((message) => ({ role: message.role, content: message.text?.slice(message.answer?.thought ?? 0) }))
	.filter((message) => message.content);

// Forget a message and all that follow, unless an answer is under way or the settings are wrong.
function cutAt(message) {
	if (running || !makeRequest([])) return false;
	chat.messages.length = chat.messages.indexOf(message);
	showChat();
	return true;
}

function userNode(message) {
	const body = h("div.said", message.text);
	const edit = () => {
		const area = h("textarea", { rows: "3", "aria-label": "Edit the message" });
		area.value = message.text;
		const send = () => {
			if (area.value.trim() && cutAt(message)) ask(area.value);
		};
		body.replaceChildren(area, h("div.bar", button("Send from here", send, ".main"),
			button("Cancel", () => body.replaceChildren(message.text))));
		area.focus();
	};
	return h("article.message.user", h("header", h("h3", "You"), copyButton(() => message.text),
		button("Edit", edit, ".quiet")), body);
}

function answerNode(message) {
	message.answer = Object.assign(new Answer(), message.answer);
	const view = new AnswerView(message.answer);
	const read = h("div.markdown");
	const thinking = h("div.markdown");
	const thought = h("details.thought", h("summary", "Thought"), thinking);
	const answered = () => message.text?.slice(message.answer.thought);
	const foot = h("footer", view.ticker);
	const toggle = button("Tokens", () => show(!node.classList.contains("tokens"), true), ".quiet");
	const again = () => {
		if (cutAt(message)) respond();
	};
	const node = h("article.message", h("header", h("h3", message.model || "Answer"), toggle, copyButton(answered),
		button("Regenerate", again, ".quiet")), thought, read, view.node, foot);
	const show = (tokens, chosen = false) => {
		node.classList.toggle("tokens", tokens);
		toggle.setAttribute("aria-pressed", String(tokens));
		if (chosen) writeStore("slipstream.tokens", tokens);
		if (!tokens) render();
	};
	// Rendered anew as the text grows, at most every tenth of a second.
	let waiting = 0;
	const render = (growing = false) => {
		if (node.classList.contains("tokens") || (growing && waiting)) return;
		clearTimeout(waiting);
		waiting = 0;
		if (growing) waiting = setTimeout(() => { waiting = 0; render(); }, 100);
		else {
			const text = message.text || message.answer.text;
			const end = message.answer.thought;
			thought.hidden = !end;
			thinking.replaceChildren(...markdown(text.slice(0, end), (code) => copyButton(() => code)));
			// an answer in the form of a JSON schema is shown as code, even if it contains Markdown
			const shown = message.request?.response_format ? `\`\`\`\`\`\`json\n${text.slice(end)}\n` : text.slice(end);
			read.replaceChildren(...markdown(shown, (code) => copyButton(() => code)));
		}
	};
	const finish = () => {
		for (const part of [view.node, read]) part.classList.remove("busy");
		render();
		view.ticker.hidden = !message.answer.rounds.length;
		foot.append(tickerKey(message.answer));
		foot.append(h("p.facts", ...facts(message.answer, message.ms), message.finish === "length" ? h("span", "cut at max tokens") : null,
			message.finish === "stopped" ? h("span", "stopped by you, so there is no receipt") : null));
		if (message.problem) foot.append(h("div.bar", h("p.problem", { role: "alert" }, message.problem), button("Try again", again)));
		if (message.request?.prediction && message.text) foot.append(diffNode(message.request.prediction.content, answered()));
		if (message.receipt) foot.append(receiptNode(message));
	};
	show(readStore("slipstream.tokens", false) === true);
	if (message.finish) finish();
	else for (const part of [view.node, read]) part.classList.add("busy");
	const grow = (segs) => {
		view.add(segs);
		render(true);
	};
	return { node, grow, finish };
}

function setBusy(controller) {
	running = controller;
	keepingFocus("ask", () => {
		$("stop").hidden = !controller;
		$("send").disabled = Boolean(controller);
	});
}

function ask(text) {
	if (!text.trim() || running || !makeRequest([])) return false;
	chat.messages.push({ role: "user", text });
	showChat();
	respond();
	return true;
}

async function respond() {
	const request = makeRequest(history());
	if (!request) return;
	const controller = new AbortController();
	const own = chat;
	const message = { role: "assistant", text: "", model, request, answer: {}, finish: null };
	own.messages.push(message);
	const shown = answerNode(message);
	const { answer } = message;
	$("messages").append(shown.node);
	shown.node.scrollIntoView({ block: "nearest" });
	setBusy(controller);
	const speak = sentences();
	const begun = performance.now();
	try {
		for await (const chunk of stream("v1/chat/completions", request, controller.signal)) {
			const follow = innerHeight + scrollY > document.body.scrollHeight - 120;
			const before = answer.text.length;
			shown.grow(answer.take(chunk));
			speak(answer.text.slice(before));
			if (follow) scrollTo(0, document.body.scrollHeight);
		}
		message.finish = answer.finish;
	} catch (error) {
		message.finish = controller.signal.aborted ? "stopped" : "error";
		if (!controller.signal.aborted) message.problem = error.message;
	}
	Object.assign(message, { text: answer.text, receipt: answer.receipt, ms: performance.now() - begun });
	shown.grow(answer.end());
	speak("", true);
	shown.finish();
	if (!message.problem) announce({ stopped: "Stopped by you.", length: "Cut at max tokens." }[message.finish] ?? "End of the answer.");
	setBusy(null);
	save(own);
}

// ---- race

class Lane {
	constructor(title, about) {
		this.title = title;
		this.clock = h("p.clock", "0.00 s");
		this.fill = h("i");
		this.facts = h("p.facts");
		this.body = h("div");
		this.node = h("article.card.lane", h("h3", title), h("p.hint", about), this.clock,
			h("div.meter", { "aria-hidden": "true" }, this.fill), this.facts, this.body);
		this.reset();
	}
	reset(most = 0) {
		this.answer = new Answer();
		this.view = new AnswerView(this.answer);
		this.most = most;
		this.node.classList.remove("done");
		this.body.replaceChildren(this.view.node);
		this.tick(0);
	}
	take(chunk) {
		this.view.add(this.answer.take(chunk));
		this.view.node.scrollTop = this.view.node.scrollHeight;
	}
	tick(ms) {
		this.clock.textContent = seconds(ms);
		this.fill.style.width = `${this.most ? Math.min(100, (100 * this.answer.ids.length) / this.most) : 0}%`;
		if (ms) this.facts.replaceChildren(...facts(this.answer, ms));
	}
	end(ms) {
		this.view.add(this.answer.end());
		this.most = this.answer.ids.length;
		this.tick(ms);
		this.node.classList.add("done");
		this.view.node.scrollTop = 0;
	}
}

const lanes = [
	new Lane("Plain", "One token per forward of the target"),
	new Lane("Speculative", "Drafted, then checked several at a time"),
];
let racing = null;
let recorded = null;

// Run a request and write down when each chunk came.
async function measure(request, lane, signal) {
	lane.reset(request.max_tokens ?? 0);
	$("race-status").textContent = `measuring: ${lane.title}`;
	const chunks = [];
	const begun = performance.now();
	for await (const chunk of stream("v1/chat/completions", request, signal)) {
		const elapsed = performance.now() - begun;
		chunks.push([elapsed, chunk]);
		lane.take(chunk);
		lane.tick(elapsed);
	}
	const ms = chunks.at(-1)?.[0] ?? 0;
	lane.end(ms);
	return { chunks, ms, answer: lane.answer };
}

function replay(runs, signal) {
	runs.forEach((run, index) => lanes[index].reset(run.answer.ids.length));
	const next = runs.map(() => 0);
	const begun = performance.now();
	return new Promise((resolve) => {
		const frame = () => {
			const now = performance.now() - begun;
			let going = false;
			runs.forEach(({ chunks, ms }, index) => {
				if (next[index] === chunks.length) return;
				while (chunks[next[index]]?.[0] <= now) lanes[index].take(chunks[next[index]++][1]);
				if (next[index] === chunks.length) lanes[index].end(ms);
				else {
					lanes[index].tick(now);
					going = true;
				}
			});
			if (going && !signal.aborted) requestAnimationFrame(frame);
			else resolve();
		};
		requestAnimationFrame(frame);
	});
}

function firstDifference(first, second) {
	const shorter = Math.min(first.length, second.length);
	for (let index = 0; index < shorter; index++) if (first[index] !== second[index]) return index;
	return first.length === second.length ? null : shorter;
}

function verdict([plain, quick], request) {
	const character = firstDifference(plain.answer.text, quick.answer.text);
	const token = firstDifference(plain.answer.ids, quick.answer.ids);
	const times = `${(plain.ms / quick.ms).toFixed(2)}×`;
	if (character === null && token === null) {
		const bytes = new TextEncoder().encode(plain.answer.text).length;
		return seal(true, "Identical", `${bytes} bytes of ${plain.answer.ids.length} tokens, seed ${request.seed}: equal to the last byte.`, times);
	}
	const near = (text) => JSON.stringify(text.slice(Math.max(0, character - 15), character + 25));
	const where = character === null ? `the texts are equal, but token ${token + 1} is another`
		: `the first difference is at character ${character + 1}: plain ${near(plain.answer.text)}, speculative ${near(quick.answer.text)}`;
	return seal(false, "Different", `With seed ${request.seed} ${where}.`, times);
}

async function race(work) {
	racing = new AbortController();
	keepingFocus("race-ask", () => {
		$("race-stop").hidden = false;
		$("race-go").disabled = true;
		$("race-again").hidden = true;
	});
	$("verdict").replaceChildren();
	try {
		await work(racing.signal);
	} catch (error) {
		if (!racing.signal.aborted) $("verdict").replaceChildren(h("p.problem", error.message));
	}
	$("race-status").textContent = racing.signal.aborted ? "stopped" : "";
	racing.abort(); // ends the other run if one has failed
	keepingFocus("race-ask", () => { $("race-stop").hidden = true; });
	$("race-go").disabled = false;
	$("race-again").hidden = !recorded;
	racing = null;
}

// With different salts, neither run finds what the other cached or taught the drafter.
function startRace() {
	const prompt = $("race-ask").value;
	const request = prompt.trim() && makeRequest([{ role: "user", content: prompt }]);
	if (!request || racing) return;
	request.max_tokens ??= RACE_TOKENS;
	const salt = `race ${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
	const { num_draft_tokens, ...own } = request;
	const quick = { ...own, ...(num_draft_tokens ? { num_draft_tokens } : {}), cache_salt: `${salt} speculative` };
	const plain = { ...own, num_draft_tokens: 0, cache_salt: `${salt} plain` };
	const both = document.querySelector("input[name=mode]:checked").value === "both";
	recorded = null;
	lanes.forEach((lane) => lane.reset());
	race(async (signal) => {
		const first = measure(plain, lanes[0], signal);
		if (!both) await first;
		const runs = await Promise.all([first, measure(quick, lanes[1], signal)]);
		recorded = { runs, request };
		$("verdict").replaceChildren(verdict(runs, request));
	});
}

async function playBack(signal) {
	$("race-status").textContent = "replay at the measured speed";
	await replay(recorded.runs, signal);
	$("verdict").replaceChildren(verdict(recorded.runs, recorded.request));
}

// ---- engine room

const speeds = [];

function spark() {
	const most = Math.max(...speeds, 1);
	const points = speeds.map((speed, second) => `${(second * 100) / 59},${29 - (27 * speed) / most}`).join(" ");
	const line = svg("polyline", { points, "vector-effect": "non-scaling-stroke" });
	return svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" }, line);
}

function meter(share) {
	const fill = h("i");
	fill.style.width = `${Math.min(100, 100 * share)}%`;
	return h("div.meter", { "aria-hidden": "true" }, fill);
}

function card(title, size, ...children) {
	return h(`article.card${size}`, h("h3", title), ...children);
}

function laneRows(state) {
	const rows = h("div.rows");
	for (let lane = 0; lane < state.places.most; lane++) {
		const row = state.running.find((taken) => taken.lane === lane);
		rows.append(h("span.figure", `slot ${lane + 1}`));
		if (!row) rows.append(h("span.idle", "free"));
		else rows.append(meter(row.tokens / row.max_tokens), h("span.figure", `${row.tokens} of ${row.max_tokens} tokens`
			+ `${row.acceptance_rate == null ? "" : `, ${percent(row.acceptance_rate, 1)} accepted`}`));
	}
	return rows;
}

function showEngine(state) {
	speeds.push(state.tokens_per_second);
	if (speeds.length > 60) speeds.shift();
	const big = (value, unit) => h("p.big", String(value), " ", h("small", unit));
	const gauge = (title, part, whole) => card(title, "", big(part, `of ${whole}`), meter(part / (whole || 1)));
	const sources = Object.entries(state.acceptance_by_source);
	const positions = state.acceptance_by_position.slice(0, 16);
	const parts = Object.entries(state.round_shares);
	const stack = h("div.stack", { "aria-hidden": "true" });
	parts.forEach(([, share], index) => {
		const part = h(`i.p${index}`);
		part.style.flexGrow = share;
		stack.append(part);
	});
	const none = "Nothing has been drafted yet.";
	$("engine").replaceChildren(
		card("Tokens per second, last 10 s", "", big(state.tokens_per_second.toFixed(1), "tokens/s"), spark()),
		gauge("Running", state.running.length, state.places.most ?? 0),
		gauge("Waiting", state.waiting, state.queue.most),
		gauge("Prompt tokens from the cache", state.cache.cached_tokens, state.cache.prompt_tokens),
		card("Running requests", ".all", laneRows(state)),
		card("Acceptance by drafter", ".half", sources.length ? h("div.rows", ...sources.flatMap(([name, source]) => [
			h("span", name), meter(source.rate), h("span.figure", `${percent(source.rate, 1)} of ${source.drafted}`)])) : none),
		card("Acceptance by position in the draft", ".half", positions.length ? h("ol.cols", ...positions.map((share) => {
			const column = h("i", { "aria-hidden": "true" });
			column.style.height = `${100 * share}%`;
			return h("li", String(Math.round(100 * share)), column);
		})) : none, positions.length ? h("p.hint", "Per cent accepted of the 1st, 2nd, ... token of a draft.") : null),
		card("Where a round's time goes", ".all", stack, h("ul.facts", ...parts.map(([name, share], index) => h("li",
			h(`span.swatch.p${index}`), `${name} `, h("b", `${(100 * share).toFixed(1)} %`))))),
		h("p.hint.all", state.drafter ? `${state.model}${state.draft ? `, draft model ${state.draft}` : ""}, drafter `
			+ `${state.drafter}, ${state.fingerprint}, version ${state.version}` : `${state.model} is not loaded`),
	);
}

let watching = null;

async function watch() {
	watching = new AbortController();
	const { signal } = watching;
	while (!signal.aborted) {
		try {
			for await (const state of stream(`v1/slipstream/events?model=${encodeURIComponent(model)}`, null, signal)) {
				$("feed").textContent = "live, once per second";
				showEngine(state);
			}
			$("feed").textContent = "reconnecting";
		} catch (error) {
			if (signal.aborted) return;
			$("feed").textContent = error.message;
			if (error.status === 401) return;
		}
		await pause(2000);
	}
}

// ---- the page

let served = ""; // "up", "down", or what the server says of itself
let wake = () => {};

async function look() {
	let state = "down";
	try {
		const answer = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(4000) });
		state = answer.ok ? "up" : ((await answer.json().catch(() => ({}))).status ?? "not ready");
	} catch {
		// no answer: the state stays "down"
	}
	if (state !== served) await changed(state);
	return state === "up";
}

async function changed(state) {
	if (served === "down" && state === "up") announce("The server is back.");
	served = state;
	keepingFocus("ask", () => { $("lost").hidden = state !== "down"; });
	$("served").classList.toggle("down", state === "down");
	delete $("served").dataset.up;
	if (state === "up") await greet();
	else $("served").textContent = state === "down" ? "no server" : { loading: "loading the model" }[state] ?? `server: ${state}`;
}

async function greet() {
	try {
		const state = await (await call(`v1/slipstream/state?model=${encodeURIComponent(model)}`)).json();
		model = state.model;
		const names = Object.keys(state.models);
		$("models").replaceChildren(...names.map((name) => h("option", { value: name, selected: name === model }, name)));
		$("models").parentElement.hidden = names.length < 2;
		$("served").textContent = [model + (state.draft ? ` + ${state.draft}` : ""), state.draft ? null : state.drafter]
			.filter(Boolean).join(", ");
		$("served").title = state.fingerprint ?? "not loaded";
		$("served").dataset.up = "";
	} catch (error) {
		$("served").textContent = error.status === 401 ? "needs a key" : error.message;
		if (error.status === 404) model = ""; // another server has other models
		if (error.status !== 401) served = ""; // ask again at the next look
	}
}

// Look every few seconds, so that the dot is true and a server that comes back is found.
async function keepLooking() {
	for (;;) {
		const isUp = await look();
		await new Promise((resolve) => {
			wake = resolve;
			setTimeout(resolve, isUp ? 5000 : 1500);
		});
	}
}

function route() {
	const name = location.hash.match(/^#(race|engine)$/)?.[1] ?? "chat";
	for (const view of ["chat", "race", "engine"]) $(`${view}-view`).hidden = view !== name;
	for (const link of document.querySelectorAll(".tabs a")) {
		link.ariaCurrent = link.hash === `#${name}` ? "page" : null;
	}
	$("panel").hidden = name === "engine";
	document.querySelector(".work").classList.toggle("wide", name === "engine");
	watching?.abort();
	if (name === "engine") watch();
}

function setTheme(theme) {
	document.documentElement.dataset.theme = theme;
	writeStore("slipstream.theme", theme);
	$("theme").textContent = `Theme: ${theme}`;
}

function sendsOnEnter(area, form) {
	area.addEventListener("keydown", (event) => {
		if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
		event.preventDefault();
		form.requestSubmit();
	});
}

function start() {
	$("unloaded").remove();
	setTheme(readStore("slipstream.theme", "system"));
	on("theme", "click", () => setTheme({ system: "light", light: "dark" }[document.documentElement.dataset.theme] ?? "system"));
	const kept = readStore("slipstream.settings", {});
	for (const name of FIELDS) {
		$(name).value = kept[name] ?? $(name).value;
		$(name).addEventListener("change", () => writeStore("slipstream.settings",
			Object.fromEntries(FIELDS.map((field) => [field, $(field).value]))));
	}
	if (matchMedia("(max-width: 60rem)").matches) $("options").open = false;
	if (matchMedia("(max-width: 40rem)").matches) $("more").open = false;
	on("settings", "submit", (event) => event.preventDefault());
	on("raw", "click", showRaw);
	on("models", "change", async () => {
		model = $("models").value;
		await greet();
		route();
	});
	on("key-button", "click", async () => (await askKey()) && (greet(), route()));
	on("key-cancel", "click", () => $("key-dialog").close());
	$("key-dialog").querySelector("form").addEventListener("submit", () => { $("key-dialog").returnValue = "ok"; });

	$("examples").append(...EXAMPLES.map((text) => button(text, () => ask(text))));
	on("composer", "submit", async (event) => {
		event.preventDefault();
		if (served === "down" && !(await look())) return; // the text stays where it is, and the line at the top says why
		if (!ask($("ask").value)) return;
		$("ask").value = "";
		sessionStorage.removeItem("slipstream.unsent");
	});
	$("ask").value = sessionStorage.getItem("slipstream.unsent") ?? "";
	on("ask", "input", () => sessionStorage.setItem("slipstream.unsent", $("ask").value));
	on("look", "click", look);
	document.addEventListener("visibilitychange", () => document.hidden || wake());
	sendsOnEnter($("ask"), $("composer"));
	on("stop", "click", () => running?.abort());
	on("new-chat", "click", () => { openChat(); $("ask").focus(); });
	on("find", "input", listChats);
	on("rename-chat", "click", () => {
		const name = prompt("Name of this chat", nameOf(chat))?.trim();
		if (!name) return;
		chat.name = name;
		save();
	});
	on("export-chat", "click", () => download("chat.json", chat));
	on("delete-chat", "click", () => {
		if (running) return;
		chat.messages = [];
		save();
		openChat(chats[0]);
	});
	on("chats", "change", () => $("chats").value && openChat(chats.find((entry) => entry.id === $("chats").value)));

	$("race-ask").value = RACE_EXAMPLE;
	$("race-lanes").append(...lanes.map((lane) => lane.node));
	on("race-form", "submit", (event) => { event.preventDefault(); startRace(); });
	sendsOnEnter($("race-ask"), $("race-form"));
	on("race-stop", "click", () => racing?.abort());
	on("race-again", "click", () => race(playBack));

	document.addEventListener("keydown", (event) => {
		if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
		$("tip").hidden = true;
		running?.abort();
		racing?.abort();
	});
	addEventListener("scroll", () => { $("tip").hidden ||= !document.querySelector(".t.on"); }, { passive: true });
	addEventListener("hashchange", route);
	chats = readStore("slipstream.chats", []);
	openChat();
	route();
	keepLooking();
}

start();
