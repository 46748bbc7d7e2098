// What the words warn of in comments: line 4 has a sentence that is too long, line 11 a word to avoid.
#pragma once

// This sentence goes on and on, for it wants to show that a reader who has come as far as this has forgotten how it
// began, and would rather have read two or three short ones in its place.
//
//     a drawing   by turns
//
inline int first = 0;  // short

/* Of two lines,
 * by turns. */
inline const char* second = "by turns";
