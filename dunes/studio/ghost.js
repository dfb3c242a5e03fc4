// The editor of the view Write: a textarea, and above it a layer with the same text and the suggestion at the cursor.

const FONT = "font: 14px/20px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;";
const PAPER = "bg-[#fff] dark:bg-[var(--q-dark-page)]"; // hides the text below

export default {
  template: `
<div class="w-full flex flex-wrap gap-6" style="accent-color: var(--q-primary); font-variant-numeric: tabular-nums">
  <div class="min-w-0 flex flex-col gap-3" style="flex: 0 1 42rem">
    <div class="flex flex-wrap gap-x-6">
      <label>Threshold {{ percent(threshold) }} <input type="range" max="1" step="0.01" v-model.number="threshold"></label>
      <label>Beams {{ beams }} <input type="range" min="1" max="8" v-model.number="beams" @change="key && ask()"></label>
      <span v-if="times.length" class="dim">{{ times[0].toFixed(1) }} ms, median of {{ times.length }}: {{ median.toFixed(1) }} ms</span>
    </div>
    <div class="overflow-auto" style="max-height: 24rem; scroll-padding: 4rem 0; border-left: 3px solid var(--q-primary)"><div class="relative">
      <textarea ref="text" class="absolute inset-0 w-full h-full p-2 border-0 resize-none overflow-hidden bg-transparent"
        style="${FONT}" aria-label="Text" aria-describedby="keys" spellcheck="false" @input="read" @click="read" @keyup="read" @select="read"
        @keydown.tab.exact="accept($event, ghost)" @keydown.arrow-right.ctrl.exact="accept($event, word)"
        @keydown.arrow-right.alt.exact="accept($event, word)" @keydown.esc="controller?.abort(); suggestion = ''"></textarea>
      <pre class="relative p-2 m-0 pointer-events-none" style="${FONT} min-height: 16rem" aria-hidden="true"><span
        class="invisible">{{ before }}</span><span v-if="ghost" class="ghost ml-px ${PAPER}" style="color: #888">{{
        ghost }}</span><span :class="ghost ? '${PAPER}' : 'invisible'">{{ rest }}</span><span class="invisible">{{
        after.slice(rest.length) }} </span></pre>
    </div></div>
    <div id="keys" class="dim">Tab accepts the suggestion, Ctrl+Right or Alt+Right one word, Escape dismisses it.
      Tab without a suggestion leaves the editor. Nothing is saved.</div>
    <div v-if="error || note" :class="error && 'text-negative'" role="alert">{{ error || note }}</div>
    <div :class="{ dim: !ghost }">
      <button v-for="token in tokens" class="token code px-1" @focus="chosen = token" @mouseenter="chosen = token"
        :style="'border-bottom: 3px solid var(--' + (isCopied(token) ? 'train)' : 'val)')"
        @click="token.copied && (token.copied[0] ? $emit('source', token.copied) : reveal(token.copied, before + after))">{{ token.text.replace(/\\n/, "⏎")
        }}<br><small>{{ percent(token.probability) }}</small></button>
      <div v-if="chosen" class="my-3">{{ isCopied(chosen) ? "Copied" : "From the model" }};
        {{ percent(chosen.model) }} by the model alone; most probable: <span
        v-for="[text, prob] in chosen.likely.filter(([text]) => text)" class="mr-4"><span class="code">{{ JSON.stringify(text) }}</span> {{ percent(prob) }}</span>
        <span v-if="chosen.copied">occurs in {{ name(chosen.copied) }}</span></div>
      <div v-for="each in suggestions"><span class="code">{{ each.text || "(nothing)" }}</span> <span class="dim">first word
        {{ percent(each.word) }}, line {{ percent(each.line) }}, {{ each.source }}</span></div>
    </div>
  </div>
  <div v-if="source" class="min-w-0" style="flex: 1 1 20rem" @keydown.esc="source = null; $refs.text.focus()">
    <b>{{ name(source.place) }}</b> <button @click="source = null; $refs.text.focus()" class="underline">Close</button>
    <div class="overflow-auto" style="${FONT} max-height: 32rem">
      <div v-for="(line, i) in source.lines" ref="lines" tabindex="-1" :class="{ 'bg-amber-100 dark:bg-amber-900':
        i + 1 === source.place[1] }"><span class="dim">{{ String(i + 1).padStart(4) }}</span> {{ line }}</div></div>
  </div>
</div>`,
  data: () => ({
    key: "", path: "", before: "", after: "", threshold: 0, beams: null, times: [], error: "", note: "",
    suggestion: "", suggestions: [], tokens: [], chosen: null, source: null, selects: false,
  }),
  computed: {
    ghost: (vm) => (vm.suggestion && !vm.selects && vm.suggestions[0].word >= vm.threshold ? vm.suggestion : ""),
    word: (vm) => vm.ghost.match(/^[^\p{L}\p{N}_]*[\p{L}\p{N}_]*/u)[0],
    rest: (vm) => vm.after.split("\n", 1)[0],
    median: (vm) => [...vm.times].sort((a, b) => a - b)[vm.times.length >> 1],
    isCopied: (vm) => (token) => vm.suggestions[0].source === "copies" || token.model < token.probability / 2,
  },
  methods: {
    percent: (prob) => `${(100 * prob).toFixed(prob < 0.1 ? 1 : 0)}\u00a0%`,
    name: ([file, line]) => `${file || "this text"}, line ${line}`,
    load(values, text) {
      Object.assign(this, { selects: null, error: "" }, values);
      this.$refs.text.value = text ?? this.$refs.text.value;
      this.read();
    },
    read() {
      const { value, selectionStart: end, selectionEnd } = this.$refs.text;
      const [before, after, selects] = [value.slice(0, end), value.slice(end), selectionEnd > end];
      if (before === this.before && after === this.after && selects === this.selects) return;
      const typed = before.slice(this.before.length);
      this.suggestion = typed && this.suggestion.startsWith(typed) ? this.suggestion.slice(typed.length) : "";
      Object.assign(this, { before, after, selects });
      if (this.key) this.ask();
    },
    async ask() {
      this.controller?.abort();
      const { signal } = (this.controller = new AbortController());
      const { key, before, after, path, beams } = this;
      try {
        await new Promise((resolve) => setTimeout(resolve, 20)); // ms in which the next key aborts this request
        const body = JSON.stringify({ before, after, path, beams, tokens: true });
        const reply = await fetch(`/api/${key}/suggest`, { method: "POST", body, signal });
        const { error, suggestions, tokens = [], milliseconds } = await reply.json();
        if (error) throw Error(error.message);
        const chosen = tokens.find((token) => token.copied) ?? tokens[0];
        this.times = [milliseconds, ...this.times].slice(0, 20);
        Object.assign(this, { suggestions, tokens, chosen, error: "", suggestion: suggestions[0].text });
      } catch (error) {
        if (!signal.aborted) Object.assign(this, { error: error.message, suggestion: "" });
      }
    },
    accept(event, text) {
      if (!text) return;
      event.preventDefault();
      document.execCommand("insertText", false, text); // can be undone, unlike setRangeText
    },
    reveal(place, text) {
      this.source = { place, lines: text.split("\n") };
      this.$nextTick(() => this.$refs.lines[place[1] - 1]?.focus());
    },
  },
};
