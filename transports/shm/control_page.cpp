#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <kvferry/transports/shm/control_page.hpp>

namespace kvferry::shm {
namespace {

constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;

/// Never 0, so that an empty word fits no key.
constexpr std::uint64_t valid_word(RegionKey key) noexcept { return (std::uint64_t{1} << 32) | key.generation; }

Status failed(const char* call) {
  return {Errc::resource_exhausted,
          fmt::format("shm: control page of {} bytes: {}: {}", sizeof(ControlWords), call, std::strerror(errno))};
}

}  // namespace

ControlPage::ControlPage(ControlPage&& other) noexcept
    : memfd_(std::move(other.memfd_)), words_(std::exchange(other.words_, nullptr)) {}

ControlPage& ControlPage::operator=(ControlPage&& other) noexcept {
  std::swap(memfd_, other.memfd_);
  std::swap(words_, other.words_);
  return *this;
}

ControlPage::~ControlPage() {
  if (words_ != nullptr) ::munmap(words_, sizeof(ControlWords));
}

Result<ControlPage> ControlPage::create() {
  Fd memfd(::memfd_create("kvferry-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd) return failed("memfd_create");
  if (::ftruncate(memfd.get(), sizeof(ControlWords)) != 0) return failed("ftruncate");
  if (::fcntl(memfd.get(), F_ADD_SEALS, size_seals | F_SEAL_SEAL) != 0) return failed("sealing");
  // Fresh memfd memory is zero, which is every word's initial value.
  return map(std::move(memfd));
}

Result<ControlPage> ControlPage::attach(Fd memfd) {
  struct stat facts {};
  if (::fstat(memfd.get(), &facts) != 0) return failed("fstat");
  if (facts.st_size != static_cast<off_t>(sizeof(ControlWords)))
    return {Errc::malformed, fmt::format("shm: the peer's control page has {} bytes, {} were expected", facts.st_size,
                                         sizeof(ControlWords))};
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & size_seals) != size_seals)
    return {Errc::malformed, "shm: the peer's control page is not sealed against a change of its size"};
  return map(std::move(memfd));
}

Result<ControlPage> ControlPage::map(Fd memfd) {
  void* memory = ::mmap(nullptr, sizeof(ControlWords), PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  if (memory == MAP_FAILED) return failed("mmap");
  ControlPage page;
  page.memfd_ = std::move(memfd);
  page.words_ = static_cast<ControlWords*>(memory);
  return page;
}

void ControlPage::give(RegionKey key) const noexcept { words_->regions[key.slot].valid.store(valid_word(key)); }

void ControlPage::revoke(RegionKey key) const noexcept { words_->regions[key.slot].valid.store(0); }

bool ControlPage::busy(RegionKey key) const noexcept { return words_->regions[key.slot].busy.load() != 0; }

BusyMark::BusyMark(const ControlPage& page, RegionKey key) noexcept : word_(page.words().regions[key.slot]) {
  word_.busy.fetch_add(1);
  if (page.words().target_closed.load() != 0)
    answer_ = Answer::closed;
  else
    answer_ = word_.valid.load() == valid_word(key) ? Answer::granted : Answer::revoked;
}

}  // namespace kvferry::shm
