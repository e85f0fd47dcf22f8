// What only a real device and the real kernel show: that connections leave nothing behind in either, and what a
// limit on locked memory leads to. KVFERRY_TEST_RDMA names two devices (scripts/test --rdma sets it); without it
// everything here is skipped.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <kvferry/transports/verbs/verbs_transport.hpp>

#include "contract_fixture.hpp"
#include "tests/support/process.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;

std::pair<std::string, std::string> two_devices() {
  const char* given = std::getenv("KVFERRY_TEST_RDMA");
  const std::string names = given != nullptr ? given : "";
  const std::size_t comma = names.find(',');
  if (comma == std::string::npos) return {};
  return {names.substr(0, comma), names.substr(comma + 1)};
}

/// What the kernel counts of each kind of object, such as "qp", on all devices; empty when it can not be asked.
std::map<std::string, long> kernel_objects() {
  FILE* rdma = ::popen("rdma resource show 2>/dev/null", "r");
  if (rdma == nullptr) return {};
  std::string text;
  for (int c = std::fgetc(rdma); c != EOF; c = std::fgetc(rdma)) text.push_back(static_cast<char>(c));
  ::pclose(rdma);
  // "0: rxe0: pd 1 cq 2 qp 3 ...", a line for each device.
  std::map<std::string, long> found;
  std::istringstream words(text);
  std::string kind;
  for (std::string word; words >> word;) {
    if (word.find_first_not_of("0123456789") == std::string::npos)
      found[kind] += std::stol(word);
    else
      kind = word;
  }
  return found;
}

class VerbsDeviceTest : public ::testing::TestWithParam<VerbsConnect> {
 protected:
  static constexpr std::uint64_t life = 0x77;

  void SetUp() override {
    if (two_devices().first.empty()) GTEST_SKIP() << "KVFERRY_TEST_RDMA names no two RDMA devices, such as rxe0,rxe1";
  }
  static VerbsConfig on(const std::string& device) {
    VerbsConfig config;
    config.devices = {device};
    config.connect = GetParam();
    return config;
  }
  void start() {
    target = std::make_unique<Side>(make_verbs_transport(on(two_devices().first)).value(), life);
    initiator = std::make_unique<Side>(make_verbs_transport(on(two_devices().second)).value(), 0x99);
    token.fill(std::byte{5});
    target->events.sessions[token] = 4;
  }
  template <class Condition>
  bool step_until(Condition&& done) {
    const TimePoint limit = Clock::now() + 10s;
    while (!done()) {
      if (Clock::now() > limit) return false;
      initiator->poll();
      target->poll();
      for (auto& [channel, request] : std::exchange(initiator->events.requests, {}))
        initiator->port->on_answer(channel, target->port->serve(request));
    }
    return true;
  }
  /// Connects, and ends the channel again.
  ::testing::AssertionResult connect_once() {
    ChannelSpec spec;
    spec.address = target->port->address();
    spec.token = token;
    spec.target_incarnation = life;
    spec.give_up = Clock::now() + 9s;
    const auto channel = initiator->port->open(spec);
    if (!channel) return ::testing::AssertionFailure() << channel.status().to_string();
    const auto& events = initiator->events;
    step_until([&] { return events.down.contains(*channel) || std::ranges::count(events.up, *channel) == 1; });
    if (events.down.contains(*channel)) return ::testing::AssertionFailure() << events.down.at(*channel).to_string();
    initiator->port->fence(*channel, {Errc::cancelled, "enough"});
    if (!step_until([&] { return events.down.contains(*channel); }))
      return ::testing::AssertionFailure() << "the fence does not end";
    initiator->events.up.clear();
    initiator->events.down.clear();
    return ::testing::AssertionSuccess();
  }

  std::unique_ptr<Side> target;
  std::unique_ptr<Side> initiator;
  Token token{};
};

INSTANTIATE_TEST_SUITE_P(, VerbsDeviceTest, ::testing::Values(VerbsConnect::bootstrap, VerbsConnect::rdmacm),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(VerbsDeviceTest, AThousandConnectionsLeaveNothingInTheKernel) {
  start();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(connect_once());
  const auto settled = [&] {
    for (int i = 0; i < 1000; ++i) {
      initiator->poll();
      target->poll();
    }
    return kernel_objects();
  };
  const auto before = settled();
  const int descriptors = own_open_descriptors();
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(connect_once()) << i;
  EXPECT_EQ(own_open_descriptors(), descriptors);
  if (before.empty()) GTEST_SKIP() << "descriptors are as before; 'rdma resource show' says nothing of the rest";
  ASSERT_TRUE(before.contains("qp") && before.contains("mr"));
  // The kernel's own end of a connection lingers for its time wait.
  std::map<std::string, long> after = settled();
  for (const TimePoint limit = Clock::now() + 30s; after != before && Clock::now() < limit; after = settled())
    ::usleep(200'000);
  EXPECT_EQ(after, before);
}

/// Locked memory limited to 64 KiB, as for a user without privileges; as before at the end.
class SmallMemlock {
 public:
  SmallMemlock() {
    ::getrlimit(RLIMIT_MEMLOCK, &before_);
    const rlimit small{64 << 10, before_.rlim_max};
    ::setrlimit(RLIMIT_MEMLOCK, &small);
    ::syscall(SYS_capget, &header_, capabilities_);
    set(capabilities_[0].effective & ~(1u << CAP_IPC_LOCK));
  }
  ~SmallMemlock() {
    set(capabilities_[0].effective);
    ::setrlimit(RLIMIT_MEMLOCK, &before_);
  }
  SmallMemlock(const SmallMemlock&) = delete;
  SmallMemlock& operator=(const SmallMemlock&) = delete;

 private:
  void set(std::uint32_t effective) {
    __user_cap_data_struct wanted[2] = {capabilities_[0], capabilities_[1]};
    wanted[0].effective = effective;
    ::syscall(SYS_capset, &header_, wanted);
  }

  rlimit before_{};
  __user_cap_header_struct header_{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct capabilities_[2]{};
};

TEST_P(VerbsDeviceTest, AMemlockOf64KiBIsNamed) {
  start();
  auto record = allocate_region("kv", 8 << 20, Access::read_write);
  ASSERT_TRUE(record);
  const auto added = target->regions.add(std::move(*record));
  ASSERT_TRUE(added);
  const SmallMemlock small;
  for (const Status& status : {target->transport->register_region(**added).status(),
                               target->transport->open_port(target->context, target->events).status()}) {
    EXPECT_EQ(status, Errc::resource_exhausted) << status.to_string();
    EXPECT_NE(status.text().find("RLIMIT_MEMLOCK, which is 64 KiB"), std::string_view::npos) << status.text();
  }
}

}  // namespace
}  // namespace kvferry::test
