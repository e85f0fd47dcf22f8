#include <cerrno>
#include <cstring>
#include <limits>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <kvferry/runtime/region.hpp>

namespace kvferry {

namespace {

std::uint64_t limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<std::uint64_t>::max();
  return limit.rlim_cur;
}

std::uint64_t physical_memory() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string limit_text(int error) {
  switch (error) {
    case EMFILE:
      return fmt::format("this process may open {} files (RLIMIT_NOFILE)", limit_of(RLIMIT_NOFILE));
    case ENFILE:
      return "the system-wide limit of open files (fs.file-max) is reached";
    case ENOSPC:
      return "the tmpfs that holds shared memory is full";
    case EFBIG:
      return "larger than a file may be here (RLIMIT_FSIZE or the file system)";
    case ENOMEM: {
      const std::uint64_t address_space = limit_of(RLIMIT_AS);
      return address_space == std::numeric_limits<std::uint64_t>::max()
                 ? "the system has not that much memory or mappings left (vm.overcommit_memory, vm.max_map_count)"
                 : fmt::format("address space is limited to {} bytes (RLIMIT_AS), or memory is used up", address_space);
    }
    default:
      return std::strerror(error);
  }
}

Status failed(const std::string& name, std::uint64_t bytes, const char* call, int error) {
  return {Errc::resource_exhausted,
          fmt::format("allocating region '{}' of {} bytes: {}: {}", name, bytes, call, limit_text(error))};
}

// Asking for more than these is known to end in a signal (SIGXFSZ, the out-of-memory killer)
// instead of an error, so they are looked at before.
Status check_limits(const std::string& name, std::uint64_t bytes) {
  if (bytes == 0) return {Errc::invalid_argument, fmt::format("allocating region '{}': 0 bytes were asked for", name)};
  if (bytes > physical_memory())
    return {Errc::resource_exhausted,
            fmt::format("allocating region '{}' of {} bytes: this machine has {} bytes of memory", name, bytes,
                        physical_memory())};
  if (bytes > limit_of(RLIMIT_FSIZE))
    return {Errc::resource_exhausted, fmt::format("allocating region '{}' of {} bytes: files are limited to {} bytes "
                                                  "(RLIMIT_FSIZE)",
                                                  name, bytes, limit_of(RLIMIT_FSIZE))};
  return {};
}

}  // namespace

Status LeaseTerms::check(std::uint64_t session, std::chrono::steady_clock::time_point now) const {
  if (session != holder)
    return {Errc::access_denied, fmt::format("the lease of region '{}' was given to another peer", region->name)};
  if (now >= end)
    return {Errc::access_denied,
            fmt::format("the lease of region '{}' ended {} ms ago: ask its owner for a new one", region->name,
                        std::chrono::duration_cast<std::chrono::milliseconds>(now - end).count())};
  return {};
}

RegionRecord::~RegionRecord() {
  if (memfd < 0 || lease) return;
  if (data) ::munmap(data, size);
  ::close(memfd);
}

Result<std::unique_ptr<RegionRecord>> allocate_region(std::string name, std::uint64_t bytes, Access access) {
  if (Status status = check_limits(name, bytes); !status) return status;

  auto record = std::make_unique<RegionRecord>();
  record->name = std::move(name);
  record->size = bytes;
  record->access = access;
  record->memfd = ::memfd_create("kvferry", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (record->memfd < 0) return failed(record->name, bytes, "memfd_create", errno);
  if (::ftruncate(record->memfd, static_cast<off_t>(bytes)) != 0)
    return failed(record->name, bytes, "ftruncate", errno);
  if (::fcntl(record->memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    return failed(record->name, bytes, "sealing the size", errno);
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, record->memfd, 0);
  if (data == MAP_FAILED) return failed(record->name, bytes, "mmap", errno);
  record->data = static_cast<std::byte*>(data);
  return record;
}

}  // namespace kvferry
