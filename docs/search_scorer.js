// Puts the pages that users look for before those that contributors read. Sphinx calls `score` for each result and
// sorts by what it gives; the numbers beside it are Sphinx's own defaults.
const PAGE_WEIGHTS = {
  faq: 7,
  quickstart: 9,
  checkpoints: 10,
  "guides/troubleshooting": 6,
  "guides/huggingface": 8,
  "guides/finetune_llm": 8,
  plan: 8,
  "guides/plain_loop": 8,
  "guides/budgets": 7,
  profile: 7,
  ranks: 9,
  config: -4,
  reference: -6,
  benchmarks: -8,
  comparison: -2,
  design: -40,
  extending: -40,
};

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const isGuide = docname.startsWith("guides/");
    // A name of the code comes first where it is what was typed, and last where that is only a part of it.
    if (kind === "object") return score >= 16 ? score + 15 : score - 15;
    return score + (PAGE_WEIGHTS[docname] ?? (isGuide ? 5 : 0));
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
