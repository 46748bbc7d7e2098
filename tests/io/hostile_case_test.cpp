// Files that nobody means well with: each is refused with a line that names the fault.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "io/call/call.h"
#include "io/raw_case.h"

namespace softdelta::io {
namespace {

// A tensor's entry of a header.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
    return '"' + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

std::string fault_of_header(const std::string& header, const std::string& data = "") {
    return fault_of_bytes(raw_case(header, data));
}

std::string fault_of_entries(const std::string& entries, const std::string& data = "") {
    return fault_of_header(std::string("{").append(entries).append("}"), data);
}

const std::string four_bytes(4, '\0');
const std::string eight_bytes(8, '\0');

TEST(HostileLength, IsCheckedAgainstTheFile) {
    EXPECT_EQ(fault_of_bytes(""), "x: not a safetensors file: 0 bytes are too few");
    EXPECT_EQ(fault_of_bytes("1234567"), "x: not a safetensors file: 7 bytes are too few");
    for (const std::uint64_t length :
         {std::uint64_t{3}, std::uint64_t{1} << 40, std::uint64_t{1} << 63, ~std::uint64_t{0}})
        EXPECT_EQ(
            fault_of_bytes(little_endian(length) + "{}"),
            "x: not a safetensors file: a header of " + std::to_string(length) + " bytes, at most 2 are possible");
}

TEST(HostileLength, OfTheHeaderIsBounded) {
    std::string bytes = little_endian(100'000'001);
    bytes.resize(8 + 100'000'001, ' ');
    EXPECT_EQ(fault_of_bytes(bytes),
              "x: not a safetensors file: a header of 100000001 bytes, at most 100000000 are possible");
}

TEST(HostileJson, IsRefusedWhereItBreaks) {
    EXPECT_EQ(fault_of_header(""), "x: the header is not valid JSON at its byte 1");
    EXPECT_EQ(fault_of_header("{"), "x: the header is not valid JSON at its byte 2");
    EXPECT_EQ(fault_of_header("{} x"), "x: the header is not valid JSON at its byte 4");
    EXPECT_EQ(fault_of_header(R"({"a":)"), "x: the header is not valid JSON at its byte 6");
    EXPECT_EQ(fault_of_header("{\"\xff\":{}}"), "x: the header is not valid JSON at its byte 3");
    EXPECT_EQ(fault_of_header(std::string("{\"a\0\":{}}", 9)), "x: the header is not valid JSON at its byte 4");
    EXPECT_EQ(fault_of_header("[]"), "x: the header is not a JSON object but an array");
    EXPECT_EQ(fault_of_header("7"), "x: the header is not a JSON object but a number");
    EXPECT_EQ(fault_of_header("null"), "x: the header is not a JSON object but null");
}

TEST(HostileJson, MayNotNest) {
    const std::string brackets(1'000'000, '[');
    EXPECT_EQ(fault_of_header(brackets), "x: the header is not a JSON object but an array");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":)" + brackets),
              R"(x: tensor "a": shape: expected whole numbers from 0, found an array)");
    std::string objects;
    for (int i = 0; i < 100'000; ++i) objects += R"({"shape":)";
    EXPECT_EQ(fault_of_header(objects), R"(x: tensor "shape": shape: expected an array, found an object)");
}

TEST(HostileMetadata, IsText) {
    EXPECT_EQ(fault_of_header(R"({"__metadata__":7})"), "x: __metadata__: expected an object, found a number");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":7}})"),
              R"(x: __metadata__: "op": expected a string, found a number)");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":{}}})"),
              R"(x: __metadata__: "op": expected a string, found an object)");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":["a"]}})"),
              R"(x: __metadata__: "op": expected a string, found an array)");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":null}})"),
              R"(x: __metadata__: "op": expected a string, found null)");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":true}})"),
              R"(x: __metadata__: "op": expected a string, found a boolean)");
}

TEST(HostileNames, MayNotAppearTwice) {
    const std::string a = entry("a", "F32", "[1]", "[0,4]");
    EXPECT_EQ(fault_of_entries(a + "," + a, four_bytes), R"(x: tensor "a": appears twice)");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{},"__metadata__":{}})"), "x: __metadata__: appears twice");
    EXPECT_EQ(fault_of_header(R"({"__metadata__":{"op":"kda","op":"kda"}})"), R"(x: __metadata__: "op" appears twice)");
    EXPECT_EQ(fault_of_header(R"({"a":{"dtype":"F32","dtype":"F32"}})"), R"(x: tensor "a": "dtype" appears twice)");
}

TEST(HostileNames, AreQuotedOnOneLine) {
    EXPECT_EQ(fault_of_header(R"({"a\n\"\u001b[0m\u00e4":7})"),
              R"(x: tensor "a\x0a\"\x1b[0m\xc3\xa4": expected an object, found a number)");
    const std::string many(1000, 'n'), first_of_them(60, 'n');
    EXPECT_EQ(fault_of_header("{\"" + many + "\":7}"),
              "x: tensor \"" + first_of_them + "\"...: expected an object, found a number");
}

TEST(HostileEntry, HasExactlyItsThreeKeys) {
    EXPECT_EQ(fault_of_header(R"({"a":7})"), R"(x: tensor "a": expected an object, found a number)");
    EXPECT_EQ(fault_of_header(R"({"a":{}})"), R"(x: tensor "a": dtype is missing)");
    EXPECT_EQ(fault_of_header(R"({"a":{"dtype":"F32"}})"), R"(x: tensor "a": shape is missing)");
    EXPECT_EQ(fault_of_header(R"({"a":{"dtype":"F32","shape":[0]}})"), R"(x: tensor "a": data_offsets is missing)");
    EXPECT_EQ(fault_of_header(R"({"a":{"more":1}})"), R"(x: tensor "a": unknown key "more")");
}

TEST(HostileEntry, HasTheRightTypes) {
    EXPECT_EQ(fault_of_header(R"({"a":{"dtype":4}})"), R"(x: tensor "a": dtype: expected a string, found a number)");
    EXPECT_EQ(fault_of_header(R"({"a":{"dtype":["F32"]}})"),
              R"(x: tensor "a": dtype: expected a string, found an array)");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":"[1]"}})"),
              R"(x: tensor "a": shape: expected an array, found a string)");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":[-1]}})"),
              R"(x: tensor "a": shape: expected whole numbers from 0, found a negative number)");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":[1.5]}})"),
              R"(x: tensor "a": shape: expected whole numbers from 0, found a fraction or too large a number)");
    EXPECT_EQ(fault_of_header(R"({"a":{"data_offsets":[0,18446744073709551616]}})"),
              R"(x: tensor "a": data_offsets: expected whole numbers from 0, found a fraction or too large a number)");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":["1"]}})"),
              R"(x: tensor "a": shape: expected whole numbers from 0, found a string)");
    EXPECT_EQ(fault_of_header(R"({"a":{"shape":[null]}})"),
              R"(x: tensor "a": shape: expected whole numbers from 0, found null)");
    for (const char* dtype : {"F8_E4M3", "U8", "I8", "f32", "", "U64", "C64"})
        EXPECT_EQ(fault_of_entries(entry("a", dtype, "[4]", "[0,4]"), four_bytes),
                  "x: tensor \"a\": type \"" + std::string(dtype) +
                      "\" is not supported; expected F64, F32, BF16, F16, BOOL, I32 or I64");
}

TEST(HostileShape, IsBounded) {
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[]", "[0,4]"), four_bytes),
              R"(x: tensor "a": no dimensions, expected 1 to 6)");
    std::string ones = "[1";
    for (int i = 0; i < 1'000'000; ++i) ones += ",1";
    EXPECT_EQ(fault_of_entries(entry("a", "F32", ones + "]", "[0,4]"), four_bytes),
              R"(x: tensor "a": shape: more than 6 numbers)");
    for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775808]", "[18446744073709551615]",
                              "[0,4294967296,4294967296]", "[4294967296,4294967296,0]", "[2305843009213693952]"})
        EXPECT_EQ(fault_of_entries(entry("a", "F32", shape, "[0,0]")), R"(x: tensor "a": the shape is too large)");
}

TEST(HostileOffsets, MatchTheShape) {
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[2]", "[0,4]"), four_bytes),
              R"(x: tensor "a": data_offsets span 4 bytes, but type and shape [2] need 8)");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[1]", "[4,0]"), four_bytes),
              R"(x: tensor "a": data_offsets: the end lies before the begin)");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[1]", "[0]"), four_bytes),
              R"(x: tensor "a": data_offsets: expected 2 numbers)");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[1]", "[0,4,8]"), four_bytes),
              R"(x: tensor "a": data_offsets: more than 2 numbers)");
}

TEST(HostileOffsets, CoverTheDataOnce) {
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[2]", "[0,8]"), four_bytes),
              R"(x: tensor "a": data end at byte 8, but the file holds 4)");
    EXPECT_EQ(fault_of_entries(entry("a", "F64", "[1152921504606846975]", "[0,9223372036854775800]")),
              R"(x: tensor "a": data end at byte 9223372036854775800, but the file holds 0)");
    const std::string overlap = entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[1]", "[4,8]");
    EXPECT_EQ(fault_of_entries(overlap, eight_bytes), R"(x: tensor "b": data overlap those of another tensor)");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[1]", "[4,8]"), eight_bytes),
              R"(x: tensor "a": 4 bytes before its data belong to no tensor)");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[1]", "[0,4]"), eight_bytes),
              "x: 4 bytes at the end belong to no tensor");
    EXPECT_EQ(fault_of_entries(entry("a", "F32", "[0]", "[9,9]"), eight_bytes),
              R"(x: tensor "a": data end at byte 9, but the file holds 8)");
    EXPECT_EQ(fault_of_header("{}", four_bytes), "x: 4 bytes at the end belong to no tensor");
}

TEST(HostileData, OfBoolIsZeroOrOne) {
    const std::string data{'\0', '\1', '\2', '\1'};
    EXPECT_EQ(fault_of_entries(entry("a", "BOOL", "[4]", "[0,4]"), data),
              R"(x: tensor "a": element 2 is 2, expected 0 or 1)");
    EXPECT_EQ(fault_of_entries(entry("mask", "U8", "[4]", "[0,4]"), data),
              R"(x: tensor "mask": element 2 is 2, expected 0 or 1)");
}

// A small case in bytes, to be damaged.
std::string valid_bytes() {
    const std::string header =
        R"({"__metadata__":{"op":"kda","scale":"0.5","use_qk_l2norm_in_kernel":"true"},)" +
        entry("q", "BF16", "[1,2,1,2]", "[0,8]") + "," + entry("k", "BF16", "[1,2,1,2]", "[8,16]") + "," +
        entry("v", "F32", "[1,2,1,1]", "[16,24]") + "," + entry("g", "F32", "[1,2,1,2]", "[24,40]") + "," +
        entry("o", "F32", "[1,2,1,1]", "[40,48]") + "," + entry("cu_seqlens", "I32", "[2]", "[48,56]") + "}";
    return raw_case(header, std::string(48, '\0') + std::string({0, 0, 0, 0, 2, 0, 0, 0}));
}

// One to four random changes: a byte, a bit, a piece cut out, doubled, or put elsewhere, an end cut off.
std::string damage(std::string bytes, std::mt19937& random) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
    for (std::size_t changes = 1 + below(4); changes > 0 && !bytes.empty(); --changes) {
        const std::size_t at = below(bytes.size()), n = 1 + below(12);
        switch (below(6)) {
            case 0:
                bytes[at] = static_cast<char>(random() & 0xff);
                break;
            case 1:
                bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
                break;
            case 2:
                bytes.erase(at, n);
                break;
            case 3:
                bytes.insert(at, bytes.substr(below(bytes.size()), n));
                break;
            case 4:
                bytes[at] = "0123456789[]{},:\"-."[below(19)];
                break;
            default:
                bytes.resize(at);
        }
    }
    return bytes;
}

TEST(DamagedCase, IsReadOrRefused) {
    ASSERT_EQ(call_of(parse(valid_bytes())).outputs, std::vector<std::string>{"o"});
    std::mt19937 random(20);
    int read = 0, mapped = 0;
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes = damage(valid_bytes(), random);
        if (i % 2 == 0 && bytes.size() > 8) bytes.replace(0, 8, valid_bytes(), 0, 8);  // get past the length
        try {
            const CaseFile file = parse(bytes);
            ++read;
            const Call call = call_of(file);
            ++mapped;
            for (const std::string& name : output_names(call)) output_shape(call, name);
        } catch (const CaseError& error) {
            ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos);
            ASSERT_EQ(std::string(error.what()).substr(0, 3), "x: ");
        }
    }
    EXPECT_GT(read, 100);  // damage to data only, or to a number that does not matter
    EXPECT_GT(mapped, 50);
}

}  // namespace
}  // namespace softdelta::io
