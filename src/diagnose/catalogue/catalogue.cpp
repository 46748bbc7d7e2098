#include "diagnose/catalogue/catalogue.h"

#include <set>
#include <sstream>
#include <string_view>

#include "diagnose/catalogue/places.h"

namespace softdelta::diagnose {

namespace {

void write_table(std::ostringstream& page, std::span<const Entry> entries) {
    std::set<std::string_view> sources;
    page << "| name | the kernel's mistake | formula: right → mistaken |\n|---|---|---|\n";
    for (const Entry& e : entries) {
        page << "| `" << e.name << "` | " << e.sentence << " | " << e.formula << " |\n";
        sources.insert(e.source);
    }
    page << "\nRight formulas:";
    for (const std::string_view source : sources) page << "\n- " << source;
    page << "\n";
}

}  // namespace

std::string catalogue_page() {
    std::ostringstream page;
    page << R"(# Diagnose

<!-- Written by `softdelta diagnose --catalogue`. -->

`softdelta diagnose FILE` takes a case file whose results fail `softdelta verify`. It says three things:

- **Where**: which rows, heads, sequences and chunks have errors beyond rounding; constant factors. `--plot FILE.svg` draws them.
- **Which stage**: the first wrong intermediate in the order of data flow, if the dump has some under the names of
  [stages.md](stages.md).
- **Which mistake**: each mistake below is computed in f64 on the dump's inputs and compared with its results. Those without a
  name are changes at places.

The exit status is that of `verify`. `--json` prints the same for programs.

## How mistakes are ranked

Every result is cut into blocks of 64 rows of a head. In each block, the difference between the dump and the mistaken truth is
compared with what rounding may cost a right kernel there ([math.md](math.md), "Limits of error"). The sum of log(1 + difference²)
over all blocks orders the entries.

An entry *explains* a dump when all of this holds:

- no block is off by more than twice what rounding may cost, or by more than a hundredth of the error before;
- half of the squared error in the wrong blocks goes away;
- it beats noise. An error of less than four times what rounding may cost may be noise of any size, unless the mistake has
  its pattern. With errors fitted in each block, Σ n/2·log(before² / left²) over blocks of n independent errors must
  exceed log(entries) + 3.

If no name leaves only rounding, changes at places are tried, likeliest first. A place whose loss would show in a right result,
or not in a wrong one, is excluded; so are factors unlike the error's share of what the loss changes.

If nothing beats noise, no pattern fits by more than 3 σ (as the best of so many), and the error is no constant factor, the report
says "no mistake, only more noise than allowed". If nothing explains the dump, the four best are tried with others: pairs whose
effects, added up, leave least.

Entries that give the same results on this input stand beside the best. Entries that change less than rounding may are not ranked.

A mistake of the forward pass is also tried with right gradients, and with right outputs.

Changes drawn at random (`tests/diagnose/points_test.cpp`, seeds from 9000); tied: the input cannot tell them apart.

| kind of change | drawn | named first, or tied | in the first three | does not show | a wrong name |
|---|---|---|---|---|---|
| a factor | 148 | 147 | 148 | 0 | 0 |
| decay, gates | 36 | 35 | 35 | 0 | 0 |
| head, sequence | 14 | 14 | 14 | 0 | 0 |
| operands | 5 | 3 | 3 | 2 | 0 |
| products, states | 33 | 25 | 26 | 6 | 0 |
| rows | 46 | 45 | 45 | 1 | 0 |
| sums | 18 | 18 | 18 | 0 | 0 |
| all | 300 | 287 | 289 | 9 | 0 |

## Large calls

If trying the names takes more than 2·10¹¹ multiply-adds, the report says which part of the call was examined: some sequences,
and some key heads with all heads that read them. It has what differs most from the library's own fast path, and what differs
least. Results that sum over more (dbias over heads, dA_log over sequences) are left out. `softdelta verify` judges the whole.

On 2 of 16 virtual cores (Intel, beside other work), gated_delta_rule with D128 takes 17 s for B1 T512 H4, and 38 s for
B1 T4096 H32 (two heads examined), where no mistake explains the dump.

)";
    page << "## Delta rules: " << delta_entries().size()
         << " mistakes\n\nNames as in [math.md](math.md), \"The chunk form\".\n\n";
    write_table(page, delta_entries());
    page << "\n## Attention: " << attention_entries().size()
         << " mistakes\n\ni' is the key on the diagonal of row i; dp = do vᵀ.\n\n";
    write_table(page, attention_entries());
    page << "\n## Changes at places\n\n" << places_page();
    return page.str();
}

}  // namespace softdelta::diagnose
