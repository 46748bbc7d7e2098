// What is written comes back, and what reaches the disk is whole.
#include "io/file/case_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "io/raw_case.h"

namespace softdelta::io {
namespace {

namespace fs = std::filesystem;

class CaseFiles : public testing::Test {
  protected:
    void SetUp() override {
        const auto* test = testing::UnitTest::GetInstance()->current_test_info();
        folder = fs::path(testing::TempDir()) / (std::string("softdelta_case_") + test->name());
        fs::remove_all(folder);
        fs::create_directories(folder);
    }
    void TearDown() override { fs::remove_all(folder); }
    std::string path(const std::string& name) const { return (folder / name).string(); }

    fs::path folder;
};

// Bytes that differ from tensor to tensor; 0 and 1 for bool.
OwnedTensor make_tensor(DType dtype, const std::vector<std::int64_t>& shape) {
    OwnedTensor tensor(dtype, shape);
    auto* bytes = static_cast<unsigned char*>(tensor.data());
    for (std::size_t i = 0; i < tensor.bytes(); ++i) {
        const auto byte = static_cast<unsigned char>(i * 7 + static_cast<std::size_t>(dtype));
        bytes[i] = dtype == DType::boolean ? byte & 1 : byte;
    }
    return tensor;
}

std::string bytes_of(const OwnedTensor& t) {
    return {static_cast<const char*>(t.data()), t.bytes()};
}

CaseFile make_file() {
    CaseFile file;
    file.metadata = {{"op", "kda"}, {"producer", "quotes \" and \xc3\xa4"}, {"", "empty key"}};
    file.tensors["f64"] = make_tensor(DType::f64, {2, 3});
    file.tensors["f32"] = make_tensor(DType::f32, {5});
    file.tensors["bf16"] = make_tensor(DType::bf16, {1, 3, 1});
    file.tensors["f16"] = make_tensor(DType::f16, {7});
    file.tensors["bool"] = make_tensor(DType::boolean, {3, 1, 1, 1, 1, 1});
    file.tensors["i32"] = make_tensor(DType::i32, {3});
    file.tensors["i64"] = make_tensor(DType::i64, {2});
    file.tensors["empty"] = make_tensor(DType::f32, {4, 0, 2});
    file.tensors["empty_too"] = make_tensor(DType::i64, {0});
    return file;
}

void expect_equal(const CaseFile& a, const CaseFile& b) {
    EXPECT_EQ(a.metadata, b.metadata);
    ASSERT_EQ(a.tensors.size(), b.tensors.size());
    for (const auto& [name, tensor] : a.tensors) {
        ASSERT_EQ(b.tensors.count(name), 1u) << name;
        const OwnedTensor& other = b.tensors.at(name);
        EXPECT_EQ(tensor.dtype(), other.dtype()) << name;
        EXPECT_EQ(tensor.shape(), other.shape()) << name;
        EXPECT_EQ(bytes_of(tensor), bytes_of(other)) << name;
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(other.data()) % 64, 0u) << name;
    }
}

TEST_F(CaseFiles, ComeBackAsWritten) {
    write_case(path("a"), make_file());
    expect_equal(make_file(), read_case(path("a")));
    for (const auto& entry : fs::directory_iterator(folder)) EXPECT_EQ(entry.path().filename(), "a");
}

TEST_F(CaseFiles, WithoutTensorsComeBack) {
    write_case(path("a"), CaseFile{});
    expect_equal(CaseFile{}, read_case(path("a")));
}

TEST_F(CaseFiles, HoldAlignedData) {
    write_case(path("a"), make_file());
    std::ifstream stream(path("a"), std::ios::binary);
    std::uint64_t header_bytes = 0;
    stream.read(reinterpret_cast<char*>(&header_bytes), 8);
    EXPECT_EQ(header_bytes % 8, 0u);
    std::string header(header_bytes, '\0');
    stream.read(header.data(), static_cast<std::streamsize>(header_bytes));
    EXPECT_NE(header.find(R"("f64":{"dtype":"F64","shape":[2,3],"data_offsets":[0,48]})"), header.npos) << header;
    EXPECT_NE(header.find(R"("bool":{"dtype":"BOOL","shape":[3,1,1,1,1,1],"data_offsets":[)"), header.npos) << header;
}

TEST_F(CaseFiles, ReplaceOlderOnesThroughLinks) {
    write_case(path("a"), CaseFile{});
    fs::create_symlink(path("a"), path("link"));
    write_case(path("link"), make_file());
    EXPECT_TRUE(fs::is_symlink(path("link")));
    expect_equal(make_file(), read_case(path("a")));
}

TEST_F(CaseFiles, ThatCannotBeWrittenLeaveNothing) {
    EXPECT_EQ(fault_of([&] { write_case(path("no/such/folder"), CaseFile{}); }),
              path("no/such/folder") + ": cannot be written: No such file or directory");
    EXPECT_EQ(fault_of([&] { write_case(folder.string(), CaseFile{}); }), folder.string() + ": not a regular file");
    CaseFile bad;
    bad.tensors["a"] = OwnedTensor();
    EXPECT_EQ(fault_of([&] { write_case(path("a"), bad); }),
              path("a") + ": tensor \"a\" cannot be stored: it has no dimensions or a reserved name");
    bad.tensors = {{"__metadata__", make_tensor(DType::f32, {1})}};
    EXPECT_NE(fault_of([&] { write_case(path("a"), bad); }).find("reserved name"), std::string::npos);
    bad.tensors.clear();
    bad.metadata = {{"producer", "\xff"}};
    EXPECT_EQ(fault_of([&] { write_case(path("a"), bad); }),
              path("a") + ": names and metadata to be stored must be UTF-8");
    EXPECT_TRUE(fs::is_empty(folder));
}

TEST_F(CaseFiles, ThatDoNotFitLeaveTheOldOneAlone) {
    write_case(path("a"), CaseFile{});
    rlimit old{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    rlimit small = old;
    small.rlim_cur = 100;
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);  // exceeding the limit shall be an error, not the end
    setrlimit(RLIMIT_FSIZE, &small);
    const std::string fault = fault_of([&] { write_case(path("a"), make_file()); });
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_EQ(fault, path("a") + ": cannot be written: File too large");
    expect_equal(CaseFile{}, read_case(path("a")));
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
}

TEST_F(CaseFiles, ThatCannotBeReadAreNamed) {
    EXPECT_EQ(fault_of([&] { read_case(path("none")); }), path("none") + ": cannot be read: No such file or directory");
    EXPECT_EQ(fault_of([&] { read_case(folder.string()); }), folder.string() + ": not a regular file");
    std::ofstream(path("short")) << "1234";
    EXPECT_EQ(fault_of([&] { read_case(path("short")); }),
              path("short") + ": not a safetensors file: 4 bytes are too few");
}

TEST(ParseCase, CopiesUnalignedData) {
    const std::string header = R"({"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]},)"
                               R"("mask":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]}})";
    const double value = 0.1;
    std::string data(9, '\1');
    std::memcpy(data.data() + 1, &value, 8);
    const CaseFile file = parse(raw_case(header, data));
    EXPECT_EQ(*static_cast<const double*>(file.tensors.at("b").data()), value);
    EXPECT_EQ(file.tensors.at("mask").dtype(), DType::boolean);
}

TEST(OwnedTensors, KnowTheirSize) {
    const OwnedTensor tensor(DType::bf16, {3, 5});
    EXPECT_EQ(tensor.count(), 15);
    EXPECT_EQ(tensor.bytes(), 30u);
    EXPECT_EQ(bytes_of(tensor), std::string(30, '\0'));
    EXPECT_FALSE(OwnedTensor().view());
    EXPECT_EQ(OwnedTensor().count(), 0);
    const std::int64_t huge = std::int64_t{1} << 40;
    EXPECT_EQ(fault_of([&] {
                  OwnedTensor(DType::f32, {0, huge, huge});
              }),
              "a tensor of shape [0, 1099511627776, 1099511627776] is too large");
    EXPECT_EQ(fault_of([&] { OwnedTensor(DType::f32, {-1}); }), "a tensor of shape [-1] is too large");
}

}  // namespace
}  // namespace softdelta::io
