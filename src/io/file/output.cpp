#include "io/file/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

#include "io/file/case_file.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_write(const std::string& path, int error) {
    fail(path, "cannot be written: " + std::generic_category().message(error));
}

// Where a file is written, behind symbolic links, and what is there.
struct Target {
    fs::path folder, name;
    bool exists = false;
    struct stat old {};
};

Target find_target(const std::string& path) {
    if (path.empty() || path.find('\0') != std::string::npos) cannot_write(path, ENOENT);
    fs::path at = path;
    std::error_code error;
    constexpr int most_links = 40;
    for (int links = 0; fs::is_symlink(fs::symlink_status(at, error)); ++links) {
        if (links == most_links) cannot_write(path, ELOOP);
        const fs::path to = fs::read_symlink(at, error);
        if (error) cannot_write(path, error.value());
        at = at.parent_path() / to;  // `to` alone where that begins at the root
    }
    Target target;
    target.folder = at.has_parent_path() ? at.parent_path() : ".";
    target.name = at.filename();
    target.exists = stat(at.c_str(), &target.old) == 0;
    if (!target.exists && errno != ENOENT) cannot_write(path, errno);
    if (target.exists && !S_ISREG(target.old.st_mode)) fail(path, "not a regular file");
    if (target.name.empty()) cannot_write(path, ENOENT);
    if (target.exists && access(at.c_str(), W_OK) != 0) cannot_write(path, errno);
    if (access(target.folder.c_str(), W_OK | X_OK) != 0) cannot_write(path, errno);
    return target;
}

// The name of a file that is being written, for a handler of signals: one at a time, which is all that a program has.
struct Unfinished {
    std::atomic<bool> taken{false}, named{false};
    int folder = -1;
    char name[64] = {};
};
Unfinished unfinished;

// A new file in a folder; gone again unless it gets its name.
class Temporary {
  public:
    explicit Temporary(const Target& target) : folder_(open(target.folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
        if (folder_ < 0) {
            error_ = errno;
            return;
        }
        std::random_device random;
        std::snprintf(name_, sizeof name_, ".softdelta-%08x%08x.partial", random(), random());
        remember();
        const mode_t mode = target.exists ? 0600 : 0666;  // of a new file less the umask
        file_ = openat(folder_, name_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (file_ < 0) error_ = errno;
        created_ = file_ >= 0;
    }
    ~Temporary() {
        if (file_ >= 0) close(file_);
        if (created_) unlinkat(folder_, name_, 0);
        if (remembered_) unfinished.named = unfinished.taken = false;
        if (folder_ >= 0) close(folder_);
    }
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;

    int error() const { return error_; }  // the first

    void write(const void* data, std::size_t size) {
        const char* from = static_cast<const char*>(data);
        constexpr std::size_t most = std::size_t{1} << 30;
        while (size > 0 && error_ == 0) {
            const ssize_t n = ::write(file_, from, std::min(size, most));
            if (n < 0) {
                if (errno != EINTR) error_ = errno;
                continue;
            }
            from += n;
            size -= static_cast<std::size_t>(n);
        }
    }

    // Takes the place of the old file, and its owner and mode.
    void take_name(const Target& target) {
        if (error_ != 0) return;
        if (target.exists) {
            constexpr mode_t permissions = 07777;
            static_cast<void>(fchown(file_, target.old.st_uid, target.old.st_gid) == 0);  // another's file: ours now
            fchmod(file_, target.old.st_mode & permissions);
        }
        if (close(file_) != 0) error_ = errno;
        file_ = -1;
        if (error_ != 0) return;
        if (renameat(folder_, name_, folder_, target.name.c_str()) != 0)
            error_ = errno;
        else
            created_ = false;
    }

  private:
    void remember() {
        if (unfinished.taken.exchange(true)) return;
        unfinished.folder = folder_;
        std::snprintf(unfinished.name, sizeof unfinished.name, "%s", name_);
        remembered_ = unfinished.named = true;
    }

    int folder_ = -1, file_ = -1, error_ = 0;
    bool created_ = false, remembered_ = false;
    char name_[sizeof Unfinished::name] = {};
};

}  // namespace

void expect_output(const std::string& path, const std::string& input) {
    find_target(path);
    std::error_code ignored;
    if (!input.empty() && fs::equivalent(path, input, ignored)) fail(path, "is the file that is read");
}

void write_file(const std::string& path, const std::function<void(const WriteBytes&)>& fill) {
    const Target target = find_target(path);
    Temporary file(target);
    if (file.error() == 0) fill([&file](const void* data, std::size_t size) { file.write(data, size); });
    file.take_name(target);
    if (file.error() != 0) cannot_write(path, file.error());
}

void remove_unfinished() noexcept {
    if (unfinished.named) unlinkat(unfinished.folder, unfinished.name, 0);
}

}  // namespace softdelta::io
