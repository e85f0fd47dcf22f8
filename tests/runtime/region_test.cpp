#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <kvferry/runtime/region.hpp>

#include "tests/support/sanitizers.hpp"

namespace kvferry {
namespace {

TEST(Access, AllowsWhatItContains) {
  EXPECT_TRUE(allows(Access::read_write, Access::read));
  EXPECT_TRUE(allows(Access::read, Access::none));
  EXPECT_FALSE(allows(Access::read, Access::write));
  EXPECT_FALSE(allows(Access::write, Access::read_write));
}

TEST(AllocateRegion, GivesZeroedPageAlignedMemory) {
  auto region = allocate_region("kv", 10'001, Access::read).value();
  EXPECT_EQ(region->name, "kv");
  EXPECT_EQ(region->size, 10'001u);
  EXPECT_EQ(region->access, Access::read);
  EXPECT_EQ(region->kind, MemoryKind::host);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region->data) % static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)), 0u);
  EXPECT_TRUE(std::all_of(region->data, region->data + region->size, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(AllocateRegion, OthersMapTheSameBytes) {
  auto region = allocate_region("kv", 4096, Access::read_write).value();
  void* view = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, region->memfd, 0);
  ASSERT_NE(view, MAP_FAILED);
  std::memcpy(region->data, "here", 5);
  EXPECT_STREQ(static_cast<const char*>(view), "here");
  ::munmap(view, 4096);
}

TEST(AllocateRegion, NobodyCanChangeTheSize) {
  auto region = allocate_region("kv", 4096, Access::read_write).value();
  EXPECT_EQ(::ftruncate(region->memfd, 100), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(region->memfd, 8192), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(AllocateRegion, ClosesItsMemoryAtTheEnd) {
  int memfd = -1;
  {
    auto region = allocate_region("kv", 4096, Access::read_write).value();
    memfd = region->memfd;
    EXPECT_GE(::fcntl(memfd, F_GETFD), 0);
  }
  EXPECT_EQ(::fcntl(memfd, F_GETFD), -1);
}

TEST(AllocateRegion, RefusesNothingAtAll) {
  EXPECT_EQ(allocate_region("kv", 0, Access::read).status().code(), Errc::invalid_argument);
}

TEST(AllocateRegion, NamesTheMemoryOfTheMachine) {
  const Status status = allocate_region("huge", std::numeric_limits<std::uint64_t>::max(), Access::read).status();
  EXPECT_EQ(status.code(), Errc::resource_exhausted);
  EXPECT_NE(status.text().find("'huge'"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find("this machine has"), std::string_view::npos) << status.text();
}

TEST(AllocateRegion, NamesTheLimitOfOpenFiles) {
  if (test::types_checked) GTEST_SKIP() << "UndefinedBehaviorSanitizer needs descriptors of its own";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const Status status = allocate_region("kv", 4096, Access::read).status();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(status.code(), Errc::resource_exhausted);
  EXPECT_NE(status.text().find("RLIMIT_NOFILE"), std::string_view::npos) << status.text();
}

TEST(AllocateRegion, NamesTheLimitOfFileSizes) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{8192, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = allocate_region("kv", 16384, Access::read).status();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(status.code(), Errc::resource_exhausted);
  EXPECT_NE(status.text().find("RLIMIT_FSIZE"), std::string_view::npos) << status.text();
}

}  // namespace
}  // namespace kvferry
