# Shows doxygen the plain comments of include/softdelta as its own: those before a declaration, those behind a member,
# and the headings of softdelta.h, which become groups. The structures of softdelta.hpp have the fields of those in
# softdelta.h; they get the same words.

# A line with one or more fields, each on a line of its own with the words of the C structure.
function fields(line, structure,    type, names, n, i, name) {
    sub(/ *\/\/.*/, "", line)
    sub(/^ */, "", line)
    type = line
    sub(/ .*/, "", type)
    sub(/^[^ ]* /, "", line)
    sub(/;$/, "", line)
    n = split(line, names, /, */)
    for (i = 1; i <= n; ++i) {
        name = names[i]
        sub(/[^A-Za-z0-9_].*/, "", name)
        print "    /// @copydoc " structure "::" name
        print "    " type " " names[i] ";"
    }
}

FNR == 1 { is_cpp = FILENAME ~ /hpp$/; at_top = 1 }

# Specialisations are left out: the template has the words.
/^template <>$/ { special = 1 }
special {
    if (/^ *}\);$/) special = 0
    next
}

# Nor the alias that the header keeps for itself.
/^using CStruct = / { next }

# A heading: /* ------ and a title on the next line.
/^\/\* -----/ {
    getline
    sub(/^ \* */, "")
    ends = sub(/ *\*\/$/, "")
    if (groups) print "/** @} */"
    print "/** @defgroup group" ++groups " " $0
    print ends ? " * @{ */" : " * @{"
    next
}

# The file's own comment; that of softdelta.h is the first page.
at_top && /^\/[\/*]/ {
    at_top = 0
    is_main = FILENAME ~ /softdelta\.h$/
    if (is_main) print "/** @file\n * The C interface. */"
    sub(/^\/[\/*] */, is_cpp ? "/// @file\n/// " : is_main ? "/** @mainpage\n * " : "/** @file\n * ")
    print
    next
}

# The structures of softdelta.hpp. Their comments name the one in softdelta.h: "(softdelta_attention_inputs)".
is_cpp && match($0, /\(softdelta_[a-z_]+\)/) && /^\/\// { named = substr($0, RSTART + 1, RLENGTH - 2) }
is_cpp && /^struct [A-Za-z]+ \{$/ { mirrored = named }
!/^\/\// { named = "" }
/^}/ { mirrored = "" }
mirrored && /^    / && !/^ *\/\// {
    declaration = declaration $0
    if ($0 ~ /;/) {
        gsub(/  +/, " ", declaration)
        fields(declaration, mirrored)
        declaration = ""
    }
    next
}
mirrored && /^ *\/\// { next }

# Behind a member.
/[;,{}] *\/[\/*] / && !/^ *\/[\/*]/ {
    sub(/\/\/ /, "///< ")
    sub(/\/\* /, "/**< ")
    print
    next
}

# Before a declaration.
{
    sub(/^ *\/\/ /, "/// ")
    sub(/^ *\/\* /, "/** ")
    print
}
END { if (groups) print "/** @} */" }
