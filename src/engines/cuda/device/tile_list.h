// Tiles of rows of packed sequences. A grid has a block for each entry, so that its size follows the rows there are,
// not their product with the sequences.
#pragma once

#include "core/tensor.h"

namespace softdelta::cuda {

struct TilePlace {
    int sequence = -1, first = 0;  // the tile's first row in its sequence; −1: no tile is here
};

// How many entries a list needs: sequences of so many rows together end in so many tiles that are not full.
inline core::Index most_tiles(core::Index rows, core::Index sequences, int tile_rows) {
    return rows / tile_rows + sequences;
}

}  // namespace softdelta::cuda
