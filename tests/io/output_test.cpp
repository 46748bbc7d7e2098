// Files that are written: whole or not at all, in the place, with the name and the mode that the caller means.
#include "io/file/output.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "io/file/text.h"
#include "io/raw_case.h"

namespace softdelta::io {
namespace {

namespace fs = std::filesystem;

class Outputs : public testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = (fs::temp_directory_path() / "softdelta-output-XXXXXX").string();
        ASSERT_NE(mkdtemp(pattern.data()), nullptr);
        folder_ = pattern;
    }
    void TearDown() override {
        fs::permissions(folder_, fs::perms::owner_all);
        fs::remove_all(folder_);
    }
    std::string path(const std::string& name) const { return (folder_ / name).string(); }
    std::string content(const std::string& name) const {
        std::ifstream stream(folder_ / name, std::ios::binary);
        return {std::istreambuf_iterator<char>(stream), {}};
    }
    mode_t mode(const std::string& name) const {
        struct stat found {};
        stat(path(name).c_str(), &found);
        return found.st_mode & 07777;
    }
    std::ptrdiff_t files() const { return std::distance(fs::directory_iterator(folder_), fs::directory_iterator()); }

  private:
    fs::path folder_;
};

void write(const std::string& path, const std::string& text) {
    write_file(path, [&](const WriteBytes& bytes) { bytes(text.data(), text.size()); });
}

TEST_F(Outputs, KeepTheModeOfTheFileThatTheyReplace) {
    for (const mode_t mode_of_old : {mode_t{0600}, mode_t{0664}, mode_t{0755}}) {
        write(path("a"), "old");
        chmod(path("a").c_str(), mode_of_old);
        write(path("a"), "new");
        EXPECT_EQ(content("a"), "new");
        EXPECT_EQ(mode("a"), mode_of_old);
    }
    const mode_t old = umask(027);
    write(path("b"), "");
    umask(old);
    EXPECT_EQ(mode("b"), mode_t{0640});
    EXPECT_EQ(files(), 2);
}

TEST_F(Outputs, AreWrittenWhereLinksLead) {
    fs::create_directory(path("folder"));
    fs::create_symlink("folder/target", path("relative"));
    fs::create_symlink(path("relative"), path("link"));
    for (const char* text : {"first", "second"}) {  // a dangling link, and one that leads to a file
        write(path("link"), text);
        EXPECT_TRUE(fs::is_symlink(path("link")) && fs::is_symlink(path("relative")));
        EXPECT_EQ(content("folder/target"), text);
    }
    fs::create_symlink("b", path("a"));
    fs::create_symlink("a", path("b"));
    EXPECT_EQ(fault_of([&] { write(path("a"), ""); }),
              path("a") + ": cannot be written: Too many levels of symbolic links");
}

TEST_F(Outputs, MayHaveAnyNameThatAFileMayHave) {
    for (const std::string& name : {std::string(255, 'n'), std::string("line\nbreak"), std::string("\xff")}) {
        write(path(name), "x");
        EXPECT_EQ(content(name), "x");
    }
    EXPECT_NE(fault_of([&] { write(path(std::string(256, 'n')), ""); }).find("File name too long"), std::string::npos);
    EXPECT_NE(fault_of([] { write("", ""); }).find("No such file"), std::string::npos);
    EXPECT_NE(fault_of([&] { write(path(std::string("a\0b", 3)), ""); }).find("No such file"), std::string::npos);
    EXPECT_EQ(files(), 3);
}

TEST_F(Outputs, AreRefusedBeforeTheWork) {
    write(path("a"), "old");
    for (const char* name : {"", "no/such/folder", "a/b"}) EXPECT_THROW(expect_output(path(name)), CaseError) << name;
    EXPECT_EQ(fault_of([&] { expect_output(path("a"), path("a")); }), path("a") + ": is the file that is read");
    fs::create_symlink("a", path("link"));
    EXPECT_THROW(expect_output(path("link"), path("a")), CaseError);
    EXPECT_THROW(expect_output(path("a"), path("link")), CaseError);
    expect_output(path("a"), path("b"));
    expect_output(path("b"), path("a"));
    if (geteuid() != 0) {  // who may do all
        chmod(path("a").c_str(), 0444);
        EXPECT_THROW(expect_output(path("a")), CaseError);
        EXPECT_THROW(write(path("a"), "new"), CaseError);
    }
    EXPECT_EQ(content("a"), "old");
    EXPECT_EQ(files(), 2);
}

TEST_F(Outputs, ThatFailOnTheWayLeaveTheOldFile) {
    write(path("a"), "old");
    EXPECT_THROW(write_file(path("a"),
                            [](const WriteBytes& bytes) {
                                bytes("new", 3);
                                throw std::runtime_error("no more");
                            }),
                 std::runtime_error);
    EXPECT_EQ(content("a"), "old");
    EXPECT_EQ(files(), 1);
}

TEST_F(Outputs, AreCleanedUpByAHandlerOfSignals) {
    write(path("a"), "old");
    EXPECT_THROW(write_file(path("a"),
                            [&](const WriteBytes& bytes) {
                                bytes("new", 3);
                                EXPECT_EQ(files(), 2);
                                remove_unfinished();
                                EXPECT_EQ(files(), 1);
                            }),
                 CaseError);
    remove_unfinished();
    EXPECT_EQ(content("a"), "old");
    EXPECT_EQ(files(), 1);
}

TEST(Text, ThatIsPrintedIsPrintable) {
    EXPECT_EQ(printable("a b/c.safetensors"), "a b/c.safetensors");
    EXPECT_EQ(printable("h\xc3\xb6he \xe2\x88\x9e \xf0\x9f\x98\x80"), "h\xc3\xb6he \xe2\x88\x9e \xf0\x9f\x98\x80");
    EXPECT_EQ(printable("a\n\r\t\x1b[2J\x7f"), "a\\x0a\\x0d\\x09\\x1b[2J\\x7f");
    EXPECT_EQ(printable(std::string("\0", 1)), "\\x00");
    EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b") << "a control of one byte";
    EXPECT_EQ(printable("\xe2\x80\xae"), "\\xe2\\x80\\xae") << "right to left";
    EXPECT_EQ(printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8") << "a separator of lines";
    EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3") << "no UTF-8";
    EXPECT_EQ(printable("\xc0\x8a\xe0\x80\x8a"), "\\xc0\\x8a\\xe0\\x80\\x8a")
        << "a line break in more bytes than it has";
    EXPECT_EQ(printable("\xed\xa0\x80\xf4\x90\x80\x80"), "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80");
    EXPECT_EQ(printable(printable("\n\xff")), printable("\n\xff"));
}

}  // namespace
}  // namespace softdelta::io
