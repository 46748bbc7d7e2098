// Which library the program PLUGIN_PROBE takes for an engine: the one in the folder beside its file, and none that a
// caller puts in its way. The folder "planted" holds one that nobody may load.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

namespace {

namespace fs = std::filesystem;

class Plugin : public testing::Test {
  protected:
    Plugin() {
        for (const char* folder : {"own", "planted", "planted/own"})
            fs::create_directories(root_ / folder / "softdelta");
        fs::copy_file(PLUGIN_PROBE, own_ / "probe");
        for (const char* folder : {"planted", "planted/softdelta", "planted/own", "planted/own/softdelta"})
            place(PLUGIN_PLANTED, root_ / folder);
        place(PLUGIN_PLANTED, own_);  // beside it
    }
    ~Plugin() override { fs::remove_all(root_); }

    static void place(const char* library, const fs::path& folder) {
        fs::copy_file(library, folder / "libsoftdelta_cuda.so", fs::copy_options::overwrite_existing);
    }

    // What it prints when it is started by this name, in the folder "planted".
    std::string run(const std::string& name) const {
        const std::string command = "cd '" + (root_ / "planted").string() +
                                    "' && LD_LIBRARY_PATH=.:" + (root_ / "planted").string() + " bash -c 'exec -a " +
                                    name + " " + (own_ / "probe").string() + "'";
        FILE* pipe = popen(command.c_str(), "r");
        std::string text;
        std::array<char, 256> part{};
        while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
        EXPECT_EQ(pclose(pipe), 0) << text;
        return text;
    }

    fs::path root_ = fs::path(testing::TempDir()) / ("softdelta_plugin_" + std::to_string(getpid()));
    fs::path own_ = root_ / "own", folder_ = own_ / "softdelta";
};

const std::array<const char*, 5> names{"probe", "./probe", "own/probe", "/nowhere/probe", "\"\""};

TEST_F(Plugin, InTheFolderBesideTheFileIsTaken) {
    place(PLUGIN_RIGHT, folder_);
    for (const char* name : names) EXPECT_EQ(run(name), "loaded right\n") << name;
}

TEST_F(Plugin, ElsewhereIsNotLookedFor) {
    for (const char* name : names) {
        const std::string text = run(name);
        EXPECT_EQ(text.rfind((folder_ / "libsoftdelta_cuda.so").string() + ": cannot open", 0), 0u)
            << name << ": " << text;
    }
}

TEST_F(Plugin, OfAnotherBuildIsRefused) {
    place(PLUGIN_OTHER, folder_);
    EXPECT_EQ(run("probe"), "loaded " + (folder_ / "libsoftdelta_cuda.so").string() +
                                ": of another build, expected " PLUGIN_BUILD_ID "\n");
}

TEST_F(Plugin, IsNotLoadedWithTheRightsOfAnother) {
    if (geteuid() != 0) GTEST_SKIP() << "only root can make such a program";
    place(PLUGIN_RIGHT, folder_);
    const fs::path probe = own_ / "probe";
    ASSERT_EQ(chown(probe.c_str(), 65534, 65534), 0);
    ASSERT_EQ(chmod(probe.c_str(), 04755), 0);
    for (const fs::path& folder : {root_, own_, folder_}) ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
    EXPECT_EQ(run("probe"), "a program with the rights of another user loads no engine\n");
}

}  // namespace
