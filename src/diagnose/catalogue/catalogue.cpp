#include "diagnose/catalogue/catalogue.h"

#include <sstream>

namespace softdelta::diagnose {

namespace {

void write_table(std::ostringstream& page, std::span<const Entry> entries) {
    page
        << "| name | the kernel's mistake | formula: right → mistaken | source of the right one |\n|---|---|---|---|\n";
    for (const Entry& e : entries)
        page << "| `" << e.name << "` | " << e.sentence << " | " << e.formula << " | " << e.source << " |\n";
}

}  // namespace

std::string catalogue_page() {
    std::ostringstream page;
    page << R"(# Diagnose

<!-- Written by `softdelta diagnose --catalogue`. -->

`softdelta diagnose FILE` takes a case file whose results fail `softdelta verify`. It says three things:

- **Where**: which rows, heads, sequences and chunks have errors beyond rounding, as patterns with the numbers behind them; NaN
  rows and rows without a key; constant factors. `--plot FILE.svg` draws rows × heads of every wrong result.
- **Which stage**: the first intermediate in the order of data flow that is wrong, if the dump carries intermediates under
  the names of [stages.md](stages.md).
- **Which mistake**: each entry of the catalogue below is a small change of the chunk form or of attention. It is computed in
  f64 on the dump's inputs and compared with the dump's results.

Exit status: 0 every result is right, 1 one is wrong, 2 the file cannot be used, 3 one cannot be judged. `--json` prints the
same for programs.

## How mistakes are ranked

Every result is cut into blocks of 64 rows of a head, as `verify` does. In each block, the difference between the dump and
the mistaken truth is measured in units of what rounding may cost a right kernel there (math.md, "Limits of error"). The sum of
log(1 + difference²) over all blocks orders the entries.

An entry *explains* a dump when all of this holds:

- no block is off by more than twice what rounding may cost, or by more than a hundredth of the error before;
- half of the squared error in the wrong blocks goes away;
- it beats the hypothesis that there is only noise. An error of less than four times what rounding may cost may be noise. Noise
  of any size is as likely as what a mistake leaves, unless the mistake has the pattern of the error. With errors fitted
  in each block, Σ n/2·log(before² / left²) over blocks of n independent errors must exceed log(entries) + 3.

If no entry beats noise, and the error is no constant factor, the report says "no mistake, only more noise than allowed" and looks no
further. Otherwise, if no entry explains the dump, the four best are tried together with every other entry: two mistakes at
once. If that fails too, the report says that nothing explains it.

Entries that give the same results on this input are listed beside the best. Entries that change less on this input than
rounding may are listed and not ranked; rounding D, dbias or the state at the wrong moment is often such an entry.

A mistake of the forward pass reaches the gradients through what that pass saves. It is also tried with right gradients (a
backward pass that recomputes everything), and with right outputs (a backward pass that makes the mistake alone).

## Large calls

If trying all mistakes takes more than 2·10¹¹ multiply-adds, a part of the call is examined: some sequences, and some key
heads with all heads that read them. What is computed of that part is exactly what the whole call has there. Those sequences and heads
are chosen that differ most from the library's own fast path, and those that differ least, as many as the bound
admits; no verdict rests on that comparison. The report says what was examined, and where else the dump differs from the fast path.
Results that sum over more than the part (dbias over heads, dA_log over sequences) are left out. Of the pairs of mistakes
the most likely are tried, up to twice the bound. `softdelta verify` judges the whole call.

Measured on 2 cores (AMD Zen 5) for B1 T4096 H32 D128: gated_delta_rule 34 to 37 s and 0.84 GB, two heads examined and nothing
explained; causal attention with 8 key heads 80 s, one key head and its four query heads examined.

)";
    page << "## Delta rules: " << delta_entries().size()
         << " mistakes\n\nNames as in [math.md](math.md), \"The chunk form\".\n\n";
    write_table(page, delta_entries());
    page << "\n## Attention: " << attention_entries().size()
         << " mistakes\n\ni' is the key on the diagonal of row i; dp = do vᵀ.\n\n";
    write_table(page, attention_entries());
    return page.str();
}

}  // namespace softdelta::diagnose
