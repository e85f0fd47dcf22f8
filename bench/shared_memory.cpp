#include "bench/shared_memory.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace kvferry::bench {
namespace {

Status failed(std::string_view what) {
  return {Errc::resource_exhausted, fmt::format("floor: {}: {}", what, std::strerror(errno))};
}

/// A process of another container may carry the same number: what was opened must be a memfd.
bool is_memfd(const std::string& path) {
  std::error_code error;
  return std::filesystem::read_symlink(path, error).string().starts_with("/memfd:");
}

}  // namespace

Result<SharedMemory> SharedMemory::create(const char* name, std::uint64_t bytes) {
  SharedMemory memory;
  memory.file_ = FileDescriptor(::memfd_create(name, MFD_CLOEXEC));
  if (!memory.file_) return failed("memfd_create");
  if (::ftruncate(memory.file_.get(), static_cast<off_t>(bytes)) != 0) return failed("sizing a memfd");
  if (auto status = memory.map(bytes); !status) return status;
  return memory;
}

Result<SharedMemory> SharedMemory::open(int pid, int memfd, std::uint64_t bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, memfd);
  if (!is_memfd(path)) {
    return Status(Errc::unsupported, fmt::format("floor: {} is no shared memory of the target: is it on this host, "
                                                 "and of the same user?",
                                                 path));
  }
  SharedMemory memory;
  memory.file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memory.file_) return failed(path);
  struct stat facts {};
  if (::fstat(memory.file_.get(), &facts) != 0) return failed(path);
  if (static_cast<std::uint64_t>(facts.st_size) < bytes) {
    return Status(Errc::out_of_bounds, fmt::format("floor: {} holds {} bytes, not {}", path, facts.st_size, bytes));
  }
  if (auto status = memory.map(bytes); !status) return status;
  return memory;
}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Status SharedMemory::map(std::uint64_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (data == MAP_FAILED) return failed("mapping shared memory");
  bytes_ = {static_cast<std::byte*>(data), bytes};
  return Status::ok();
}

}  // namespace kvferry::bench
