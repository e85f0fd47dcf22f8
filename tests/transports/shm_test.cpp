// The shared-memory transport: what it promises beyond the contract that all transports share.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <kvferry/runtime/host.hpp>
#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/shm/control_page.hpp>
#include <kvferry/transports/shm/copy.hpp>
#include <kvferry/transports/shm/options.hpp>
#include <kvferry/transports/shm/protocol.hpp>
#include <kvferry/transports/shm/server.hpp>
#include <kvferry/transports/shm/shm_transport.hpp>
#include <kvferry/transports/shm/unix_socket.hpp>

namespace kvferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr SessionId known_session = 77;

Token known_token() {
  Token token;
  token.fill(std::byte{0x5a});
  return token;
}

std::vector<std::byte> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::size_t at = 0; at < count; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, count - at));
  }
  return bytes;
}

SliceRange range_of(std::span<const Slice> slices) {
  SliceRange range{slices.data(), static_cast<std::uint32_t>(slices.size()), 0, 0};
  for (const Slice& slice : slices) range.bytes += slice.length;
  return range;
}

/// `count` slices that cut `size` bytes into equal parts.
std::vector<Slice> parts_of(std::uint64_t size, std::uint64_t count) {
  std::vector<Slice> parts;
  for (std::uint64_t i = 0; i < count; ++i) parts.push_back({i * (size / count), i * (size / count), size / count});
  return parts;
}

struct Recorder final : PortEvents {
  std::vector<ChannelId> ups;
  std::map<ChannelId, Status> downs;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> notifications;
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> messages;
  int refuse_notifications = 0;
  int refuse_messages = 0;
  std::function<void()> on_note;

  void on_channel_up(ChannelId channel) override { ups.push_back(channel); }
  void on_channel_down(ChannelId channel, const Status& why) override {
    EXPECT_TRUE(downs.emplace(channel, why).second) << "channel " << channel << " went down twice";
  }
  std::optional<SessionId> authorize(const Token& token) override {
    if (token == known_token()) return known_session;
    return std::nullopt;
  }
  bool on_notification(SessionId session, std::uint64_t sequence, std::uint32_t immediate) override {
    EXPECT_EQ(session, known_session);
    if (refuse_notifications > 0 && refuse_notifications-- > 0) return false;
    notifications.emplace_back(sequence, immediate);
    if (on_note) on_note();
    return true;
  }
  bool on_message(SessionId session, std::uint64_t sequence, std::span<const std::byte> bytes) override {
    EXPECT_EQ(session, known_session);
    if (refuse_messages > 0 && refuse_messages-- > 0) return false;
    messages.emplace_back(sequence, std::vector<std::byte>(bytes.begin(), bytes.end()));
    return true;
  }
};

/// Refused peers are part of these tests; their log lines are not.
class QuietLog final : public ::testing::Environment {
 public:
  void SetUp() override { set_log_level(LogLevel::off); }
};
[[maybe_unused]] const auto* const quiet_log = ::testing::AddGlobalTestEnvironment(new QuietLog);

/// One engine's share: its regions and one port.
class Side {
 public:
  explicit Side(std::uint64_t incarnation, ShmConfig config = {}, const shm::Options& options = {})
      : incarnation_(incarnation), transport_(make_shm_transport(config, options)) {
    PortContext context;
    context.regions = &regions_;
    context.incarnation = incarnation;
    port_ = transport_->open_port(context, events).value();
  }

  const RegionRecord* allocate(const std::string& name, std::uint64_t bytes, Access access = Access::read_write) {
    return enter(allocate_region(name, bytes, access).value());
  }

  const RegionRecord* adopt(const std::string& name, std::span<std::byte> memory, Access access = Access::read_write) {
    auto record = std::make_unique<RegionRecord>();
    record->name = name;
    record->data = memory.data();
    record->size = memory.size();
    record->access = access;
    return enter(std::move(record));
  }

  /// Allocates either engine memory or memory that stands for the user's own.
  const RegionRecord* make(bool foreign, const std::string& name, std::uint64_t bytes,
                           Access access = Access::read_write) {
    if (!foreign) return allocate(name, bytes, access);
    owned_.push_back(std::make_unique<std::vector<std::byte>>(bytes));
    return adopt(name, *owned_.back(), access);
  }

  void poll() {
    std::array<Completion, 16> completions;
    const std::size_t count = port_->poll(completions);
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_TRUE(ended.emplace(completions[i].cookie, completions[i].status).second)
          << "item " << completions[i].cookie << " completed twice";
  }

  Port& port() { return *port_; }
  void close() { port_.reset(); }
  RegionTable& regions() { return regions_; }
  Transport& transport() { return *transport_; }
  std::uint64_t incarnation() const { return incarnation_; }

  Recorder events;
  std::map<std::uint64_t, Status> ended;

 private:
  const RegionRecord* enter(std::unique_ptr<RegionRecord> record) {
    const RegionRecord* region = regions_.add(std::move(record)).value().get();
    EXPECT_TRUE(transport_->register_region(*region).is_ok());
    return region;
  }

  std::uint64_t incarnation_;
  RegionTable regions_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> owned_;
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Port> port_;
};

RemoteRegion seen_by_peer(const RegionRecord& region) {
  RemoteRegion remote;
  remote.key = region.key;
  remote.name = region.name;
  remote.size = region.size;
  remote.access = region.access;
  return remote;
}

ChannelSpec spec_for(const std::string& address, std::uint64_t incarnation) {
  ChannelSpec spec;
  spec.address = address;
  spec.token = known_token();
  spec.target_incarnation = incarnation;
  spec.give_up = Clock::now() + seconds(5);
  return spec;
}

template <class Condition>
bool step_until(std::initializer_list<Side*> sides, Condition&& condition, Duration limit = seconds(10)) {
  for (const TimePoint until = Clock::now() + limit; Clock::now() < until;) {
    for (Side* side : sides) side->poll();
    if (condition()) return true;
  }
  return false;
}

/// Opens a channel and waits for it; 0 when it did not come up.
ChannelId connect(Side& from, Side& to) {
  const Result<ChannelId> channel = from.port().open(spec_for(to.port().address(), to.incarnation()));
  if (!channel) return 0;
  const auto up = [&] {
    return std::find(from.events.ups.begin(), from.events.ups.end(), *channel) != from.events.ups.end();
  };
  return step_until({&from, &to}, up) ? *channel : 0;
}

/// Two engines in one process, stepped by the test.
class ShmPair : public ::testing::Test {
 protected:
  explicit ShmPair(ShmConfig config = {}, const shm::Options& options = {})
      : a(std::make_unique<Side>(1, config, options)), b(std::make_unique<Side>(2, config, options)) {}

  void SetUp() override {
    channel = connect(*a, *b);
    ASSERT_NE(channel, 0u);
  }

  WorkItem item(Op op, const RegionRecord* local, const RemoteRegion& remote, std::span<const Slice> slices) {
    WorkItem work;
    work.op = op;
    work.cookie = ++last_cookie;
    work.local = local;
    work.remote = &remote;
    work.slices = range_of(slices);
    work.waiters = waiters;
    return work;
  }

  WorkItem send_item(std::uint64_t sequence, std::span<const std::byte> message) {
    WorkItem work;
    work.op = Op::send;
    work.cookie = ++last_cookie;
    work.sequence = sequence;
    work.message = message;
    return work;
  }

  bool post(const WorkItem& work) { return a->port().post(channel, {&work, 1}) == 1; }

  bool finish(std::uint64_t cookie) {
    return step_until({a.get(), b.get()}, [&] { return a->ended.contains(cookie); });
  }

  /// Posts one item and waits for its outcome.
  Status carry(const WorkItem& work) {
    if (!post(work)) return {Errc::internal, "not taken"};
    if (!finish(work.cookie)) return {Errc::internal, "no completion"};
    return a->ended[work.cookie];
  }

  std::unique_ptr<Side> a;
  std::unique_ptr<Side> b;
  ChannelId channel = 0;
  std::uint64_t last_cookie = 0;
  WorkOffer* waiters = nullptr;  ///< of every item that is made
};

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// ---------------------------------------------------------------- which hosts

TEST(ShmReach, EnginesOfOneKernelReachEachOtherAndOthersAreToldWhyNot) {
  const auto transport = make_shm_transport({});
  const HostFacts here = local_host();
  EXPECT_FALSE(here.host_id.empty());
  EXPECT_TRUE(transport->reaches(here, local_host()).is_ok());
  const Status status = transport->reaches(here, {"another-kernel"});
  EXPECT_EQ(status, Errc::no_path);
  EXPECT_NE(status.text().find("another-kernel"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find(here.host_id), std::string_view::npos) << status.text();
  EXPECT_FALSE(transport->reaches({}, {}).is_ok()) << "two engines that know nothing are not neighbours";
}

TEST(ShmReach, TheEnvironmentReplacesTheHostId) {
  ::setenv("KVFERRY_HOST_ID", "rack-7", 1);
  const HostFacts replaced = local_host();
  ::unsetenv("KVFERRY_HOST_ID");
  EXPECT_EQ(replaced.host_id, "rack-7");
  EXPECT_NE(local_host().host_id, "rack-7");
}

TEST(ShmReach, OnlyHostMemoryIsRegistered) {
  RegionRecord gpu;
  gpu.name = "gpu";
  gpu.kind = MemoryKind::cuda;
  gpu.size = 4096;
  EXPECT_EQ(make_shm_transport({})->register_region(gpu).status(), Errc::unsupported);
}

TEST(ShmReach, AMemfdThatCanShrinkIsRefusedAtRegistration) {
  RegionRecord region;
  region.name = "unsealed";
  region.size = 4096;
  region.memfd = ::memfd_create("unsealed", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(region.memfd, 4096), 0);
  const Status status = make_shm_transport({})->register_region(region).status();
  EXPECT_EQ(status, Errc::unsupported);
  EXPECT_NE(status.text().find("unsealed"), std::string_view::npos) << status.text();
}

// ---------------------------------------------------------------- moving bytes

struct Way {
  const char* name;
  bool foreign;
  int threads;
  std::uint64_t streaming;
  bool waiter = false;
};

/// A thread that does nothing but take part in what is offered, as one in Transfer::wait does.
class Waiter {
 public:
  ~Waiter() {
    ended_.store(true);
    thread_.join();
  }
  WorkOffer* offer() noexcept { return &offer_; }

 private:
  void run() {
    while (!ended_.load()) (void)offer_.take_part();
  }

  WorkOffer offer_;
  std::atomic<bool> ended_{false};
  std::thread thread_{[this] { run(); }};
};

class ShmBytes : public ShmPair, public ::testing::WithParamInterface<Way> {
 protected:
  ShmBytes() : ShmPair(config()) {
    if (!GetParam().waiter) return;
    waiter = std::make_unique<Waiter>();
    waiters = waiter->offer();
  }
  static ShmConfig config() {
    ShmConfig config;
    config.copy_threads = GetParam().threads;
    config.streaming_bytes = GetParam().streaming;
    config.chunk_bytes = 64 << 10;
    return config;
  }

  std::unique_ptr<Waiter> waiter;
};

TEST_P(ShmBytes, RandomSlicesArriveAndNothingElseChanges) {
  constexpr std::size_t size = 1 << 20;
  const RegionRecord* local = a->make(true, "local", size);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", size);
  const RemoteRegion remote = seen_by_peer(*target);
  std::mt19937_64 random(11);
  for (int round = 0; round < 9; ++round) {
    const auto local_before = random_bytes(size, 2 * round + 1);
    const auto target_before = random_bytes(size, 2 * round + 2);
    std::copy(local_before.begin(), local_before.end(), local->data);
    std::copy(target_before.begin(), target_before.end(), target->data);

    // Disjoint slices of odd lengths, some empty, in shuffled order.
    std::vector<Slice> slices;
    const std::uint64_t longest = round % 3 == 0 ? 150'000 : 3'000;
    std::uint64_t at = 0;
    while (slices.size() < 300) {
      const std::uint64_t length = random() % 7 == 0 ? 0 : random() % longest;
      if (at + length + 64 > size) break;
      slices.push_back({at + random() % 64, 0, length});
      slices.back().remote_offset = slices.back().local_offset;
      at = slices.back().local_offset + length;
    }
    std::vector<std::size_t> places(slices.size());
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
    std::shuffle(slices.begin(), slices.end(), random);

    const Op op = round % 2 == 0 ? Op::read : Op::write;
    WorkItem work = item(op, local, remote, slices);
    work.transfer_bytes = GetParam().threads > 0 ? 8 << 20 : 0;
    ASSERT_TRUE(carry(work).is_ok()) << a->ended[work.cookie].to_string();

    auto expected_local = local_before;
    auto expected_target = target_before;
    for (const Slice& slice : slices) {
      if (op == Op::read)
        std::copy_n(target_before.begin() + slice.remote_offset, slice.length,
                    expected_local.begin() + slice.local_offset);
      else
        std::copy_n(local_before.begin() + slice.local_offset, slice.length,
                    expected_target.begin() + slice.remote_offset);
    }
    ASSERT_EQ(std::memcmp(local->data, expected_local.data(), size), 0) << "round " << round;
    ASSERT_EQ(std::memcmp(target->data, expected_target.data(), size), 0) << "round " << round;
  }
}

TEST_P(ShmBytes, ManySmallPiecesGoThroughOneItem) {
  constexpr std::size_t count = 5000;
  const RegionRecord* local = a->make(true, "local", count * 16);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", count * 16);
  const auto content = random_bytes(count * 16, 5);
  std::copy(content.begin(), content.end(), target->data);
  const RemoteRegion remote = seen_by_peer(*target);
  std::vector<Slice> slices(count);
  for (std::size_t i = 0; i < count; ++i) slices[i] = {(count - 1 - i) * 16, i * 16, 16};
  ASSERT_TRUE(carry(item(Op::read, local, remote, slices)).is_ok());
  for (std::size_t i = 0; i < count; ++i)
    ASSERT_EQ(std::memcmp(local->data + (count - 1 - i) * 16, target->data + i * 16, 16), 0) << i;
}

TEST_P(ShmBytes, BoundsAndRightsAreChecked) {
  const RegionRecord* local = a->make(true, "local", 8192);
  const RegionRecord* open = b->make(GetParam().foreign, "open", 4096);
  const RegionRecord* closed = b->make(GetParam().foreign, "closed", 4096, Access::read);
  std::memset(closed->data, 1, closed->size);

  const RemoteRegion remote = seen_by_peer(*open);
  const std::array<Slice, 2> leaves{Slice{0, 0, 16}, Slice{0, 4090, 7}};
  Status status = carry(item(Op::read, local, remote, leaves));
  EXPECT_EQ(status, Errc::out_of_bounds);
  EXPECT_NE(status.text().find("'open'"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find("4090"), std::string_view::npos) << status.text();

  RemoteRegion larger = remote;  // what a peer with a wrong table believes
  larger.size = 1 << 20;
  const std::array<Slice, 1> beyond{Slice{0, 4096, 1}};
  EXPECT_EQ(carry(item(Op::write, local, larger, beyond)), Errc::out_of_bounds);
  const std::array<Slice, 1> overflow{Slice{0, ~std::uint64_t{0}, 2}};
  EXPECT_EQ(carry(item(Op::write, local, larger, overflow)), Errc::out_of_bounds);
  const std::array<Slice, 1> local_leaves{Slice{8190, 0, 3}};
  status = carry(item(Op::read, local, remote, local_leaves));
  EXPECT_EQ(status, Errc::out_of_bounds);
  EXPECT_NE(status.text().find("'local'"), std::string_view::npos) << status.text();

  RemoteRegion read_only = seen_by_peer(*closed);
  const std::array<Slice, 1> piece{Slice{0, 0, 16}};
  EXPECT_TRUE(carry(item(Op::read, local, read_only, piece)).is_ok());
  status = carry(item(Op::write, local, read_only, piece));
  EXPECT_EQ(status, Errc::access_denied);
  EXPECT_NE(status.text().find("'closed'"), std::string_view::npos) << status.text();
  read_only.access = Access::read_write;  // the target's word counts
  EXPECT_EQ(carry(item(Op::write, local, read_only, piece)), Errc::access_denied);
  EXPECT_EQ(closed->data[0], std::byte{1});
}

TEST_P(ShmBytes, OffsetsBeyondFourGigabytes) {
  if (GetParam().foreign) GTEST_SKIP() << "the same arithmetic, without a sparse allocation";
  constexpr std::uint64_t size = (5ull << 30) + 123;
  const RegionRecord* local = a->make(true, "local", 4096);
  const RegionRecord* target = b->allocate("large", size);
  const RemoteRegion remote = seen_by_peer(*target);
  const auto content = random_bytes(4096, 3);
  std::copy(content.begin(), content.end(), local->data);
  const std::array<Slice, 2> slices{Slice{0, size - 2048, 2048}, Slice{2048, (4ull << 30) - 1000, 2048}};
  ASSERT_TRUE(carry(item(Op::write, local, remote, slices)).is_ok());
  EXPECT_EQ(std::memcmp(target->data + size - 2048, content.data(), 2048), 0);
  EXPECT_EQ(std::memcmp(target->data + (4ull << 30) - 1000, content.data() + 2048, 2048), 0);
}

TEST_P(ShmBytes, AReleasedRegionIsLeftAloneByItsPeers) {
  constexpr std::size_t size = 4 << 20;
  const RegionRecord* local = a->make(true, "local", size);
  std::memset(local->data, 0xaa, size);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", size);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, size}};

  const std::uint64_t first = last_cookie + 1;
  const std::vector<Slice> parts = parts_of(size, 32);
  for (const Slice& part : parts) {
    WorkItem work = item(Op::write, local, remote, {&part, 1});
    work.transfer_bytes = size;
    ASSERT_TRUE(post(work));
  }
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return a->ended.contains(first + 1); }));

  ASSERT_TRUE(b->regions().retire(target->key).is_ok());
  // Only the target is stepped: the initiator's poller need not lend a hand.
  ASSERT_TRUE(step_until({b.get()}, [&] { return b->port().release_region(target->key, false); }));
  std::memset(target->data, 0x55, size);
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return a->ended.size() == 32u; }));
  EXPECT_EQ(std::count(target->data, target->data + size, std::byte{0x55}), static_cast<std::ptrdiff_t>(size));
  // Helpers may have been through before the release; without them the queue was still long.
  if (GetParam().threads == 0) {
    EXPECT_EQ(a->ended[32], Errc::unknown_region);
  }
  EXPECT_TRUE(a->events.downs.empty()) << "other regions of the channel stay usable";
  const Status late = carry(item(Op::read, local, remote, all));
  EXPECT_EQ(late, Errc::unknown_region);
  EXPECT_NE(late.text().find("'kv'"), std::string_view::npos) << late.text();

  const RegionRecord* next = b->make(GetParam().foreign, "next", 4096);
  const RemoteRegion next_remote = seen_by_peer(*next);
  const std::array<Slice, 1> piece{Slice{0, 0, 4096}};
  EXPECT_TRUE(carry(item(Op::read, local, next_remote, piece)).is_ok());
}

TEST_P(ShmBytes, FenceEndsEveryItemAndNothingMovesAfterwards) {
  constexpr std::size_t size = 4 << 20;
  const RegionRecord* local = a->make(true, "local", size);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", size);
  std::memset(target->data, 0x33, size);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, size}};
  const std::vector<Slice> parts = parts_of(size, 40);
  for (const Slice& part : parts) {
    WorkItem work = item(Op::read, local, remote, {&part, 1});
    work.transfer_bytes = size;
    ASSERT_TRUE(post(work));
  }
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return a->ended.contains(1); }));
  a->port().fence(channel, {Errc::timed_out, "the test lost patience"});
  EXPECT_EQ(a->port().progress() == Progress::idle, false);
  ASSERT_TRUE(step_until(
      {a.get()}, [&] { return a->ended.size() == 40u && a->events.downs.contains(channel); }, milliseconds(500)));
  std::memset(local->data, 0x77, size);
  for (int i = 0; i < 100; ++i) a->poll();
  EXPECT_EQ(std::count(local->data, local->data + size, std::byte{0x77}), static_cast<std::ptrdiff_t>(size));
  for (const auto& [cookie, status] : a->ended) {
    if (status) continue;
    EXPECT_EQ(status, Errc::channel_error);
    EXPECT_NE(status.text().find("lost patience"), std::string_view::npos) << status.text();
  }
  if (GetParam().threads == 0) {
    EXPECT_FALSE(a->ended[40].is_ok());
  }
  EXPECT_FALSE(post(item(Op::read, local, remote, all)));

  channel = connect(*a, *b);
  ASSERT_NE(channel, 0u) << "a new channel to the same peer can be opened";
  EXPECT_TRUE(carry(item(Op::read, local, remote, all)).is_ok());
  EXPECT_EQ(local->data[size - 1], std::byte{0x33});
}

TEST_P(ShmBytes, CancelEndsWhatWaits) {
  constexpr std::size_t size = 1 << 20;
  const RegionRecord* local = a->make(true, "local", size);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", size);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, size}};
  std::vector<std::uint64_t> cookies;
  const std::vector<Slice> parts = parts_of(size, 8);
  for (const Slice& part : parts) {
    WorkItem work = item(Op::read, local, remote, {&part, 1});
    work.transfer_bytes = 8 * size;
    cookies.push_back(work.cookie);
    ASSERT_TRUE(post(work));
  }
  for (const std::uint64_t cookie : cookies) a->port().cancel(channel, cookie);
  a->port().cancel(channel, 999);
  a->port().cancel(channel + 1, cookies[0]);
  ASSERT_TRUE(step_until({a.get()}, [&] { return a->ended.size() == 8u; })) << "without any help of the target";
  for (const std::uint64_t cookie : cookies) EXPECT_EQ(a->ended[cookie], Errc::cancelled);
  EXPECT_TRUE(carry(item(Op::read, local, remote, all)).is_ok());

  // Now that the region is mapped, items are caught in the middle.
  WorkItem work = item(Op::read, local, remote, all);
  work.transfer_bytes = 8 * size;
  ASSERT_TRUE(post(work));
  a->poll();
  a->port().cancel(channel, work.cookie);
  ASSERT_TRUE(finish(work.cookie));
  if (GetParam().threads == 0) {
    EXPECT_EQ(a->ended[work.cookie], Errc::cancelled);
  }
}

TEST_P(ShmBytes, PortsCanBeDestroyedInTheMiddleOfWork) {
  constexpr std::size_t size = 4 << 20;
  const RegionRecord* local = a->make(true, "local", size);
  const RegionRecord* target = b->make(GetParam().foreign, "kv", size);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, size}};
  const std::vector<Slice> parts = parts_of(size, 64);
  for (const Slice& part : parts) {
    WorkItem work = item(Op::read, local, remote, {&part, 1});
    work.transfer_bytes = size;
    ASSERT_TRUE(post(work));
  }
  EXPECT_FALSE(post(item(Op::read, local, remote, all))) << "a full channel takes nothing more";
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return a->ended.contains(1); }));
  a->close();
  std::memset(local->data, 0x44, size);
  EXPECT_EQ(std::count(local->data, local->data + size, std::byte{0x44}), static_cast<std::ptrdiff_t>(size));
}

INSTANTIATE_TEST_SUITE_P(Ways, ShmBytes,
                         ::testing::Values(Way{"memfd", false, 0, 0}, Way{"foreign", true, 0, 0},
                                           Way{"memfd_streaming", false, 0, 1}, Way{"memfd_helpers", false, 2, 4 << 20},
                                           Way{"foreign_helpers", true, 2, 0}, Way{"memfd_waiter", false, 0, 0, true},
                                           Way{"memfd_waiter_streaming", false, 0, 1, true},
                                           Way{"foreign_waiter", true, 0, 0, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(ShmPair, AReadOnlyRegionIsMappedReadOnly) {
  const RegionRecord* local = a->make(true, "local", 8192);
  const RegionRecord* target = b->allocate("kv", 8192, Access::read);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, 8192}};
  ASSERT_TRUE(carry(item(Op::read, local, remote, all)).is_ok());
  std::ifstream maps("/proc/self/maps");
  int writable = 0;
  int read_only = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:kvferry ") == std::string::npos) continue;
    if (line.find(" rw-s ") != std::string::npos) ++writable;
    if (line.find(" r--s ") != std::string::npos) ++read_only;
  }
  EXPECT_EQ(writable, 1) << "the owner's";
  EXPECT_EQ(read_only, 1) << "the peer's";
  // Whoever has the descriptor can not get a writable mapping out of it either.
  EXPECT_EQ(::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, target->memfd, 0), MAP_FAILED);
}

TEST_F(ShmPair, AForgottenRegionIsUnmappedAtThePeer) {
  const RegionRecord* local = a->make(true, "local", 8192);
  const RegionRecord* target = b->allocate("kv", 8192);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, 8192}};
  ASSERT_TRUE(carry(item(Op::read, local, remote, all)).is_ok());
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("/memfd:kvferry ") != std::string::npos;
    return count;
  };
  const int before = mappings();
  ASSERT_TRUE(b->regions().retire(target->key).is_ok());
  ASSERT_TRUE(b->port().release_region(target->key, false));
  EXPECT_TRUE(step_until({a.get()}, [&] { return mappings() == before - 1; }));
}

// ---------------------------------------------------------------- notifications and messages

TEST_F(ShmPair, AnImmediateArrivesAfterItsDataAndCompletesOnceAccepted) {
  const RegionRecord* local = a->make(true, "local", 4096);
  const RegionRecord* target = b->allocate("kv", 4096);
  const RemoteRegion remote = seen_by_peer(*target);
  std::memset(local->data, 0x66, 4096);
  const std::array<Slice, 1> all{Slice{0, 0, 4096}};
  WorkItem work = item(Op::write_imm, local, remote, all);
  work.immediate = 0xdeadbeef;
  work.sequence = 42;
  bool visible = false;
  b->events.on_note = [&] { visible = target->data[4095] == std::byte{0x66}; };
  b->events.refuse_notifications = 3;
  ASSERT_TRUE(post(work));
  EXPECT_TRUE(step_until({a.get(), b.get()}, [&] { return b->events.refuse_notifications == 2; }));
  EXPECT_FALSE(a->ended.contains(work.cookie));
  EXPECT_EQ(b->port().progress(), Progress::waiting);
  EXPECT_LE(b->port().next_wakeup(), Clock::now() + milliseconds(2));
  ASSERT_TRUE(finish(work.cookie));
  EXPECT_TRUE(a->ended[work.cookie].is_ok());
  ASSERT_EQ(b->events.notifications.size(), 1u);
  EXPECT_EQ(b->events.notifications[0], std::make_pair(std::uint64_t{42}, 0xdeadbeefu));
  EXPECT_TRUE(visible);

  WorkItem bare;
  bare.op = Op::write_imm;
  bare.cookie = ++last_cookie;
  bare.immediate = 7;
  bare.sequence = 43;
  EXPECT_TRUE(carry(bare).is_ok()) << "no data at all is a pure notification";
  EXPECT_EQ(b->events.notifications.size(), 2u);
}

TEST_F(ShmPair, MessagesOfAllSizesArriveInOrderWhileTheTargetIsShortOfRoom) {
  std::vector<std::vector<std::byte>> sent;
  b->events.refuse_messages = 20;
  for (std::uint32_t i = 0; i < 64; ++i) {
    sent.push_back(random_bytes(i % 4 == 0 ? max_message_bytes - i : i * 17, i));
    ASSERT_TRUE(post(send_item(i, sent.back()))) << i;
  }
  WorkItem note;
  note.op = Op::write_imm;
  note.cookie = ++last_cookie;
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return a->ended.size() == 64u; }));
  ASSERT_EQ(b->events.messages.size(), 64u);
  for (std::uint32_t i = 0; i < 64; ++i) {
    EXPECT_EQ(b->events.messages[i].first, i);
    EXPECT_EQ(b->events.messages[i].second, sent[i]);
  }
  for (const auto& [cookie, status] : a->ended) EXPECT_TRUE(status.is_ok()) << status.to_string();
}

TEST_F(ShmPair, AFullMessageQueueDoesNotHoldUpNotifications) {
  b->events.refuse_messages = 1 << 30;
  const auto bytes = random_bytes(100, 1);
  const WorkItem message = send_item(1, bytes);
  ASSERT_TRUE(post(message));
  WorkItem note;
  note.op = Op::write_imm;
  note.cookie = ++last_cookie;
  EXPECT_TRUE(carry(note).is_ok());
  EXPECT_FALSE(a->ended.contains(message.cookie));
  b->events.refuse_messages = 0;
  EXPECT_TRUE(finish(message.cookie));
}

TEST_F(ShmPair, TooLongMessagesAreRefused) {
  const auto bytes = random_bytes(max_message_bytes + 1, 1);
  EXPECT_EQ(carry(send_item(1, bytes)), Errc::too_large);
}

TEST_F(ShmPair, AFencedMessageIsNotDeliveredLater) {
  const auto bytes = random_bytes(1000, 1);
  b->events.refuse_messages = 1 << 30;
  const WorkItem stalled = send_item(1, bytes);
  ASSERT_TRUE(post(stalled));
  ASSERT_TRUE(step_until({a.get(), b.get()}, [&] { return b->events.refuse_messages < 1 << 30; }));
  b->events.refuse_messages = 0;
  const WorkItem unread = send_item(2, bytes);
  ASSERT_TRUE(post(unread));
  a->poll();
  a->port().fence(channel, {Errc::timed_out, "enough"});
  for (int i = 0; i < 600; ++i) b->poll();
  EXPECT_TRUE(b->events.messages.empty());
  a->poll();
  EXPECT_EQ(a->ended[stalled.cookie], Errc::channel_error);
  EXPECT_EQ(a->ended[unread.cookie], Errc::channel_error);
}

// ---------------------------------------------------------------- channels

TEST(ShmChannel, RefusalsSayWhy) {
  Side a(1);
  Side b(2);
  ChannelSpec stale = spec_for(b.port().address(), 3);
  ChannelSpec stranger = spec_for(b.port().address(), 2);
  stranger.token.fill(std::byte{1});
  const ChannelId first = a.port().open(stale).value();
  const ChannelId second = a.port().open(stranger).value();
  ASSERT_TRUE(step_until({&a, &b}, [&] { return a.events.downs.size() == 2u; }));
  EXPECT_EQ(a.events.downs[first], Errc::stale_peer);
  EXPECT_EQ(a.events.downs[second], Errc::access_denied);
  EXPECT_TRUE(a.events.ups.empty());
  EXPECT_EQ(a.port().progress(), Progress::idle);
}

TEST(ShmChannel, AnAddressThatNobodyListensOnNamesTheNetworkNamespace) {
  Side a(1);
  const Result<ChannelId> channel = a.port().open(spec_for("kvferry-shm-nobody", 2));
  EXPECT_EQ(channel.status(), Errc::unreachable);
  EXPECT_NE(channel.status().text().find("network namespace"), std::string_view::npos) << channel.status().text();
  EXPECT_EQ(a.port().open(spec_for(std::string(300, 'x'), 2)).status(), Errc::invalid_argument);
}

TEST(ShmChannel, ATargetThatDoesNotAnswerIsGivenUp) {
  Side a(1);
  Side silent(2);
  ChannelSpec spec = spec_for(silent.port().address(), 2);
  spec.give_up = Clock::now() + milliseconds(30);
  const ChannelId channel = a.port().open(spec).value();
  EXPECT_LE(a.port().next_wakeup(), spec.give_up);
  ASSERT_TRUE(step_until({&a}, [&] { return a.events.downs.contains(channel); }));
  EXPECT_EQ(a.events.downs[channel], Errc::timed_out);
  EXPECT_GE(Clock::now(), spec.give_up);
}

TEST_F(ShmPair, TheEndOfEitherPortIsSeenByTheOther) {
  b->close();
  ASSERT_TRUE(step_until({a.get()}, [&] { return a->events.downs.contains(channel); }));
  EXPECT_EQ(a->events.downs[channel], Errc::channel_error);
}

TEST_F(ShmPair, ADroppedSessionEndsItsChannels) {
  b->port().drop_session(known_session + 1);
  for (int i = 0; i < 600; ++i) a->poll();
  EXPECT_TRUE(a->events.downs.empty());
  b->port().drop_session(known_session);
  EXPECT_TRUE(step_until({a.get()}, [&] { return a->events.downs.contains(channel); }));
}

TEST_F(ShmPair, AnIdlePortSleepsAndIsWoken) {
  EXPECT_EQ(a->port().progress(), Progress::idle);
  EXPECT_EQ(b->port().progress(), Progress::idle);
  EXPECT_EQ(b->port().next_wakeup(), TimePoint::max());
  pollfd look{b->port().wait_fd(), POLLIN, 0};
  for (int i = 0; i < 40; ++i) b->poll();
  EXPECT_EQ(::poll(&look, 1, 0), 0);
  const auto bytes = random_bytes(10, 1);
  ASSERT_TRUE(post(send_item(1, bytes)));
  EXPECT_EQ(a->port().progress(), Progress::runnable);
  a->poll();
  EXPECT_EQ(a->port().progress(), Progress::waiting);
  EXPECT_EQ(::poll(&look, 1, 1000), 1);
  EXPECT_EQ(b->port().next_wakeup(), TimePoint::max());
  b->poll();
  EXPECT_EQ(b->events.messages.size(), 1u) << "the first poll after a sleep looks at once";
}

class ShmHelpers : public ShmPair {
 protected:
  ShmHelpers() : ShmPair(config()) {}
  static ShmConfig config() {
    ShmConfig config;
    config.copy_threads = 2;
    return config;
  }
};

TEST_F(ShmHelpers, AHelperWakesASleepingPoller) {
  const RegionRecord* local = a->make(true, "local", 1 << 20);
  const RegionRecord* target = b->allocate("kv", 1 << 20);
  const RemoteRegion remote = seen_by_peer(*target);
  const std::array<Slice, 1> all{Slice{0, 0, 1 << 20}};
  ASSERT_TRUE(carry(item(Op::read, local, remote, all)).is_ok());
  for (int i = 0; i < 50; ++i) {
    const WorkItem work = item(Op::read, local, remote, all);
    ASSERT_TRUE(post(work));
    a->poll();
    while (!a->ended.contains(work.cookie)) {
      [[maybe_unused]] const TimePoint wake = a->port().next_wakeup();
      pollfd look{a->port().wait_fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&look, 1, 5000), 1) << "asleep for ever at item " << i;
      a->poll();
    }
    ASSERT_TRUE(a->ended[work.cookie].is_ok());
  }
  for (int i = 0; i < 3; ++i) {
    [[maybe_unused]] const TimePoint wake = a->port().next_wakeup();
    a->poll();
  }
  pollfd look{a->port().wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&look, 1, 0), 0) << "the bell is quiet again";
}

// ---------------------------------------------------------------- waiters that copy

/// Where a waiter's copying stops until the test lets it go on, and how it ends then.
struct Gate {
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  int error = 0;
};
Gate* gate = nullptr;
thread_local bool stops_at_gate = false;

template <auto call>
ssize_t gated_call(pid_t pid, const iovec* here, unsigned long count, const iovec* there, unsigned long there_count,
                   unsigned long flags) {
  if (!stops_at_gate) return call(pid, here, count, there, there_count, flags);
  ++gate->inside;
  while (!gate->open.load()) std::this_thread::yield();
  errno = gate->error;
  return gate->error != 0 ? -1 : call(pid, here, count, there, there_count, flags);
}

/// A waiter that holds one share of a transfer from foreign memory for as long as the test wants.
class ShmWaiters : public ShmPair {
 protected:
  ShmWaiters() : ShmPair(config(), {.calls = {gated_call<::process_vm_readv>, gated_call<::process_vm_writev>}}) {
    gate = &gate_;
    waiters = &offer;
  }
  ~ShmWaiters() override {
    gate_.open.store(true);
    if (thread.joinable()) thread.join();
  }

  /// A poll copies one share, so that the waiter finds something left even when it comes late.
  static ShmConfig config() {
    ShmConfig config;
    config.chunk_bytes = 64 << 10;
    return config;
  }

  void SetUp() override {
    ShmPair::SetUp();
    local = a->make(true, "local", size);
    target = b->make(true, "kv", size);
    std::memset(target->data, 0x77, size);
    remote = seen_by_peer(*target);
    // The region's answer is awaited by one item without waiters; the next one is shared from its first poll.
    WorkItem first = item(Op::read, local, remote, one);
    first.waiters = nullptr;
    ASSERT_TRUE(carry(first).is_ok());
  }

  /// Posts a transfer and polls until a waiter is inside one share of it.
  void begin(Op op = Op::read) {
    thread = std::thread([this] {
      stops_at_gate = true;
      while (!offer.take_part() && !gate_.open.load()) std::this_thread::yield();
    });
    work = item(op, local, remote, all);
    ASSERT_TRUE(post(work));
    while (gate_.inside.load() == 0 && !ended()) {
      a->poll();
      std::this_thread::sleep_for(milliseconds(1));
    }
    ASSERT_EQ(gate_.inside.load(), 1) << "the waiter took no share";
  }

  bool ended() const { return a->ended.contains(work.cookie); }
  void let_go(int error = 0) {
    gate_.error = error;
    gate_.open.store(true);
  }

  static constexpr std::uint64_t size = 64 << 20;
  const std::array<Slice, 1> one{Slice{0, 0, 16}};
  const std::array<Slice, 1> all{Slice{0, 0, size}};
  Gate gate_;
  WorkOffer offer;
  std::thread thread;
  const RegionRecord* local = nullptr;
  const RegionRecord* target = nullptr;
  RemoteRegion remote;
  WorkItem work;
};

TEST_F(ShmWaiters, AnItemEndsOnlyWhenItsWaiterIsOut) {
  begin();
  for (int i = 0; i < 2000; ++i) a->poll();
  EXPECT_FALSE(ended());
  EXPECT_EQ(a->port().progress(), Progress::runnable);
  let_go();
  ASSERT_TRUE(finish(work.cookie));
  EXPECT_TRUE(a->ended[work.cookie].is_ok());
  EXPECT_EQ(std::memcmp(local->data, target->data, size), 0);
  EXPECT_FALSE(offer.take_part()) << "nothing is offered any more";
}

TEST_F(ShmWaiters, AWaitersErrorIsTheItems) {
  begin();
  let_go(EFAULT);
  ASSERT_TRUE(finish(work.cookie));
  EXPECT_FALSE(a->ended[work.cookie].is_ok());
}

TEST_F(ShmWaiters, ACancelledItemEndsWhenItsWaiterIsOut) {
  begin(Op::write);
  a->port().cancel(channel, work.cookie);
  for (int i = 0; i < 100; ++i) a->poll();
  EXPECT_FALSE(ended()) << "its memory is still being read";
  let_go();
  ASSERT_TRUE(finish(work.cookie));
  EXPECT_EQ(a->ended[work.cookie], Errc::cancelled);
  const WorkItem next = item(Op::read, local, remote, one);
  EXPECT_TRUE(carry(next).is_ok()) << "the channel stays usable";
}

TEST_F(ShmWaiters, AFencedChannelIsDownWhenItsWaiterIsOut) {
  begin();
  a->port().fence(channel, {Errc::cancelled, "fenced"});
  for (int i = 0; i < 100; ++i) a->poll();
  EXPECT_FALSE(ended());
  EXPECT_TRUE(a->events.downs.empty());
  let_go();
  ASSERT_TRUE(step_until({a.get()}, [&] { return a->events.downs.contains(channel); }));
  EXPECT_EQ(a->ended[work.cookie], Errc::channel_error);
}

TEST_F(ShmWaiters, ARegionIsReleasedWhenTheWaiterIsOut) {
  begin(Op::write);
  ASSERT_TRUE(b->regions().retire(target->key).is_ok());
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(b->port().release_region(target->key, false));
  let_go();
  EXPECT_TRUE(step_until({a.get(), b.get()}, [&] { return b->port().release_region(target->key, false); }));
}

TEST_F(ShmWaiters, APortThatGoesWaitsForItsWaiter) {
  begin();
  std::atomic<bool> gone{false};
  std::thread closing([&] {
    a->close();
    gone.store(true);
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(gone.load());
  let_go();
  closing.join();
  EXPECT_FALSE(offer.take_part()) << "what was offered is over, though nobody could take the offer back";
}

TEST_F(ShmPair, SmallItemsAreNotOffered) {
  WorkOffer offer;
  waiters = &offer;
  const RegionRecord* local = a->make(true, "local", 1 << 20);
  const RemoteRegion remote = seen_by_peer(*b->allocate("kv", 1 << 20));
  const std::array<Slice, 1> small{Slice{0, 0, 64 << 10}};
  const WorkItem work = item(Op::read, local, remote, small);
  ASSERT_TRUE(post(work));
  while (!a->ended.contains(work.cookie)) {
    a->poll();
    b->poll();
    EXPECT_FALSE(offer.take_part());
  }
}

class ShmAlone : public ShmPair {
 protected:
  ShmAlone() : ShmPair(config()) {}
  static ShmConfig config() {
    ShmConfig config;
    config.waiters_copy = false;
    return config;
  }
};

TEST_F(ShmAlone, NothingIsOfferedWhereWaitersMayNotCopy) {
  WorkOffer offer;
  waiters = &offer;
  const RegionRecord* local = a->make(true, "local", 8 << 20);
  const RemoteRegion remote = seen_by_peer(*b->allocate("kv", 8 << 20));
  const std::array<Slice, 1> all{Slice{0, 0, 8 << 20}};
  const WorkItem work = item(Op::read, local, remote, all);
  ASSERT_TRUE(post(work));
  while (!a->ended.contains(work.cookie)) {
    a->poll();
    b->poll();
    EXPECT_FALSE(offer.take_part());
  }
}

// ---------------------------------------------------------------- where foreign memory can not be reached

ssize_t refused_call(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long) {
  errno = EPERM;
  return -1;
}

class ShmWithoutPtrace : public ShmPair {
 protected:
  ShmWithoutPtrace() : ShmPair({}, {.calls = {refused_call, refused_call}}) {}
};

TEST_F(ShmWithoutPtrace, ForeignRegionsHaveNoPathAndAllocatedOnesWork) {
  const RegionRecord* local = a->make(true, "local", 4096);
  const RemoteRegion foreign = seen_by_peer(*b->make(true, "foreign", 4096));
  const RemoteRegion shared = seen_by_peer(*b->allocate("shared", 4096));
  const std::array<Slice, 1> all{Slice{0, 0, 4096}};
  const Status status = carry(item(Op::read, local, foreign, all));
  EXPECT_EQ(status, Errc::no_path);
  EXPECT_NE(status.text().find("ptrace"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find("'foreign'"), std::string_view::npos) << status.text();
  EXPECT_TRUE(carry(item(Op::write, local, shared, all)).is_ok());
}

// ---------------------------------------------------------------- peers that do not keep to the protocol

/// Speaks to a port packet by packet.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address) : socket_(std::move(shm::connect_to(address).value())) {}

  bool send(std::span<const std::byte> bytes, int passed = -1) {
    return shm::send_packet(socket_.get(), bytes, {}, passed) == shm::IoResult::done;
  }

  bool greet(std::uint64_t incarnation) {
    shm::HelloPacket hello;
    hello.token = known_token();
    hello.target_incarnation = incarnation;
    return send(shm::bytes_of(hello));
  }

  bool ask(RegionKey key) {
    shm::RegionRequestPacket request;
    request.key = key;
    return send(shm::bytes_of(request));
  }

  /// The next packet, while `side` is stepped. Empty when the connection ended.
  std::vector<std::byte> receive(Side& side) {
    std::vector<std::byte> buffer(shm::receive_buffer_bytes);
    std::span<std::byte> packet;
    shm::IoResult result = shm::IoResult::again;
    step_until({&side}, [&] {
      result = shm::receive_packet(socket_.get(), buffer, packet, passed);
      return result != shm::IoResult::again;
    });
    if (result != shm::IoResult::done) return {};
    return {packet.begin(), packet.end()};
  }

  bool ended(Side& side) {
    return step_until({&side}, [&] { return shm::hung_up(socket_.get()); });
  }

  void close() { socket_.reset(); }
  int socket() const { return socket_.get(); }

  shm::Fd passed;

 private:
  shm::Fd socket_;
};

TEST(ShmTarget, AnotherProtocolVersionIsNamedOnBothSides) {
  Side b(2);
  RawPeer peer(b.port().address());
  shm::HelloPacket hello;
  hello.header.version = 9;
  ASSERT_TRUE(peer.send(shm::bytes_of(hello)));
  const auto refusal = shm::decode<shm::RefusalPacket>(peer.receive(b));
  ASSERT_TRUE(refusal.has_value());
  const Status why = refusal->why.status();
  EXPECT_EQ(why, Errc::version_mismatch);
  EXPECT_NE(why.text().find("version 9"), std::string_view::npos) << why.text();
  EXPECT_NE(why.text().find("version 1"), std::string_view::npos) << why.text();
  EXPECT_TRUE(peer.ended(b));
}

TEST(ShmTarget, ABusyMarkDelaysARelease) {
  Side b(2);
  const RegionRecord* region = b.allocate("kv", 4096);
  RawPeer peer(b.port().address());
  ASSERT_TRUE(peer.greet(2));
  ASSERT_TRUE(shm::decode<shm::WelcomePacket>(peer.receive(b)).has_value());
  auto page = shm::ControlPage::attach(std::move(peer.passed)).value();
  ASSERT_TRUE(peer.ask(region->key));
  ASSERT_TRUE(shm::decode<shm::RegionReplyPacket>(peer.receive(b)).has_value());
  {
    const shm::BusyMark mark(page, region->key);
    ASSERT_EQ(mark.answer(), shm::BusyMark::Answer::granted);
    ASSERT_TRUE(b.regions().retire(region->key).is_ok());
    EXPECT_FALSE(b.port().release_region(region->key, false));
    EXPECT_EQ(shm::BusyMark(page, region->key).answer(), shm::BusyMark::Answer::revoked);
    EXPECT_FALSE(b.port().release_region(region->key, false));
  }
  EXPECT_TRUE(b.port().release_region(region->key, false));
}

TEST(ShmTarget, AMarkThatNeverClearsIsBrokenByForce) {
  Side b(2);
  const RegionRecord* region = b.allocate("kv", 4096);
  RawPeer peer(b.port().address());
  ASSERT_TRUE(peer.greet(2));
  peer.receive(b);
  auto page = shm::ControlPage::attach(std::move(peer.passed)).value();
  ASSERT_TRUE(peer.ask(region->key));
  peer.receive(b);
  // A peer that scribbles over all it can reach.
  std::memset(static_cast<void*>(&page.words()), 0xff, sizeof(shm::ControlWords));
  for (int i = 0; i < 100; ++i) b.poll();
  ASSERT_TRUE(b.regions().retire(region->key).is_ok());
  EXPECT_FALSE(b.port().release_region(region->key, false));
  const TimePoint before = Clock::now();
  EXPECT_TRUE(b.port().release_region(region->key, true));
  EXPECT_LT(Clock::now() - before, seconds(1));
  EXPECT_TRUE(peer.ended(b));
  EXPECT_TRUE(b.port().release_region(region->key, false));
}

TEST(ShmTarget, TheMarkOfADeadPeerIsVoid) {
  Side b(2);
  const RegionRecord* region = b.allocate("kv", 4096);
  RawPeer peer(b.port().address());
  ASSERT_TRUE(peer.greet(2));
  peer.receive(b);
  auto page = shm::ControlPage::attach(std::move(peer.passed)).value();
  ASSERT_TRUE(peer.ask(region->key));
  peer.receive(b);
  page.words().regions[region->key.slot].busy.store(1);
  peer.close();
  ASSERT_TRUE(b.regions().retire(region->key).is_ok());
  EXPECT_TRUE(b.port().release_region(region->key, false));
}

TEST(ShmTarget, GarbageIsSurvivedAndItsDescriptorsAreClosed) {
  Side b(2);
  const RegionRecord* region = b.allocate("kv", 4096);
  for (int i = 0; i < 600; ++i) b.poll();
  const std::size_t before = open_descriptors();
  std::mt19937 random(99);
  for (int round = 0; round < 300; ++round) {
    RawPeer peer(b.port().address());
    const bool greeted = round % 2 == 0;
    if (greeted) {
      ASSERT_TRUE(peer.greet(2));
      ASSERT_FALSE(peer.receive(b).empty());
    }
    for (int packet = 0; packet < 4; ++packet) {
      auto bytes = random_bytes(1 + random() % 300, random());
      // Half of them look right at the start.
      if (random() % 2 == 0) {
        shm::PacketHeader header;
        header.kind = static_cast<shm::PacketKind>(random() % 12);
        std::memcpy(bytes.data(), &header, std::min(bytes.size(), sizeof header));
      }
      if (random() % 8 == 0) bytes.resize(shm::receive_buffer_bytes + 100);
      peer.send(bytes, random() % 2 == 0 ? STDERR_FILENO : -1);
    }
    for (int i = 0; i < 40; ++i) b.poll();
  }
  for (int i = 0; i < 600; ++i) b.poll();
  EXPECT_EQ(open_descriptors(), before);

  Side a(1);
  EXPECT_NE(connect(a, b), 0u) << "the port still serves those who keep to the protocol";
  EXPECT_NE(b.regions().find(region->key), nullptr);
}

TEST(ShmTarget, EveryTruncationOfAPacketIsSurvived) {
  Side b(2);
  const auto truncations = [&](std::span<const std::byte> packet, bool greeted) {
    for (std::size_t size = 1; size < packet.size(); ++size) {
      RawPeer peer(b.port().address());
      if (greeted) {
        ASSERT_TRUE(peer.greet(2));
        ASSERT_FALSE(peer.receive(b).empty());
      }
      ASSERT_TRUE(peer.send(packet.first(size)));
      ASSERT_TRUE(peer.ended(b)) << size;
    }
  };
  truncations(shm::bytes_of(shm::HelloPacket()), false);
  truncations(shm::bytes_of(shm::RegionRequestPacket()), true);
  truncations(shm::bytes_of(shm::NotificationPacket()), true);
  EXPECT_TRUE(b.events.notifications.empty());
}

TEST(ShmTarget, APeerThatDoesNotWaitForAnswersIsCutOff) {
  Side b(2);
  b.events.refuse_messages = 1 << 30;
  RawPeer peer(b.port().address());
  ASSERT_TRUE(peer.greet(2));
  peer.receive(b);
  const TimePoint until = Clock::now() + seconds(5);
  std::size_t sent = 0;
  while (!shm::hung_up(peer.socket()) && Clock::now() < until) {
    sent += peer.send(shm::bytes_of(shm::MessagePacket()));
    b.poll();
  }
  EXPECT_TRUE(shm::hung_up(peer.socket()));
  EXPECT_GT(sent, shm::max_unacknowledged);
}

TEST(ShmTarget, StrangersAreFewAndDoNotStayLong) {
  shm::Options options;
  options.hello_limit = milliseconds(200);
  Side b(2, {}, options);
  std::vector<std::unique_ptr<RawPeer>> peers;
  const auto alive = [&] {
    return static_cast<std::size_t>(
        std::count_if(peers.begin(), peers.end(), [](const auto& peer) { return !shm::hung_up(peer->socket()); }));
  };
  const TimePoint start = Clock::now();
  for (std::size_t i = 0; i < shm::max_strangers + 40; ++i) {
    peers.push_back(std::make_unique<RawPeer>(b.port().address()));
    for (int j = 0; j < 20; ++j) b.poll();
  }
  for (int i = 0; i < 600; ++i) b.poll();
  if (Clock::now() - start < options.hello_limit) {
    EXPECT_EQ(alive(), shm::max_strangers);
  }
  EXPECT_LE(alive(), shm::max_strangers);
  EXPECT_TRUE(step_until({&b}, [&] { return alive() == 0; }));
  Side a(1);
  EXPECT_NE(connect(a, b), 0u);
}

/// Answers a port's greeting as a broken target might.
TEST(ShmInitiator, ABrokenTargetEndsTheChannelAndLosesNoDescriptor) {
  const std::string name = shm::random_socket_name().value();
  const shm::Fd listener = std::move(shm::listen_at(name).value());
  Side a(1);
  const std::size_t before = open_descriptors();
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const ChannelId channel = a.port().open(spec_for(name, 2)).value();
    shm::Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    ASSERT_TRUE(static_cast<bool>(socket));
    shm::WelcomePacket welcome;
    welcome.nonce_address = 0x1000;
    shm::Fd page;
    switch (round % 4) {
      case 0:  // no page at all
        shm::send_packet(socket.get(), shm::bytes_of(welcome));
        break;
      case 1: {  // a page that is too small
        page = shm::Fd(::memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        shm::send_packet(socket.get(), shm::bytes_of(welcome), {}, page.get());
        break;
      }
      case 2: {  // a page that could shrink
        page = shm::Fd(::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        ASSERT_EQ(::ftruncate(page.get(), sizeof(shm::ControlWords)), 0);
        shm::send_packet(socket.get(), shm::bytes_of(welcome), {}, page.get());
        break;
      }
      default:
        shm::send_packet(socket.get(), random_bytes(1 + random() % 500, random()), {}, STDERR_FILENO);
        break;
    }
    ASSERT_TRUE(step_until({&a}, [&] { return a.events.downs.contains(channel); })) << round;
    EXPECT_EQ(a.events.downs[channel], Errc::malformed) << a.events.downs[channel].to_string();
  }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_TRUE(a.events.ups.empty());
}

// ---------------------------------------------------------------- two processes

/// What a forked target tells its parent.
struct TargetFacts {
  std::array<char, 108> address{};
  RegionKey shared;
  RegionKey foreign;
};

constexpr std::size_t process_region_bytes = 1 << 20;
constexpr std::byte process_pattern{0x3c};

/// Serves until it is killed (or, should the test die first, until its parent is gone).
[[noreturn]] void serve(int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Side b(2);
  TargetFacts facts;
  const std::string address = b.port().address();
  std::copy(address.begin(), address.end(), facts.address.begin());
  const RegionRecord* shared = b.make(false, "shared", process_region_bytes);
  const RegionRecord* foreign = b.make(true, "foreign", process_region_bytes);
  std::memset(shared->data, std::to_integer<int>(process_pattern), process_region_bytes);
  std::memset(foreign->data, std::to_integer<int>(process_pattern), process_region_bytes);
  facts.shared = shared->key;
  facts.foreign = foreign->key;
  if (::write(report, &facts, sizeof facts) != sizeof facts) ::_exit(1);
  for (;;) b.poll();
}

class ForkedTarget {
 public:
  ForkedTarget() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    const shm::Fd reader(ends[0]);
    const shm::Fd writer(ends[1]);
    pid_ = ::fork();
    if (pid_ == 0) serve(writer.get());
    EXPECT_EQ(::read(reader.get(), &facts_, sizeof facts_), static_cast<ssize_t>(sizeof facts_));
  }
  ~ForkedTarget() { kill(); }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  std::string address() const { return facts_.address.data(); }
  RemoteRegion region(bool foreign) const {
    RemoteRegion region;
    region.key = foreign ? facts_.foreign : facts_.shared;
    region.name = foreign ? "foreign" : "shared";
    region.size = process_region_bytes;
    region.access = Access::read_write;
    return region;
  }

 private:
  pid_t pid_ = 0;
  TargetFacts facts_;
};

class ShmProcesses : public ::testing::TestWithParam<bool> {};

TEST_P(ShmProcesses, AKilledTargetIsNoticedWithinASecond) {
  ForkedTarget target;
  Side a(1);
  const ChannelId channel = a.port().open(spec_for(target.address(), 2)).value();
  ASSERT_TRUE(step_until({&a}, [&] { return !a.events.ups.empty(); }));
  const RegionRecord* local = a.make(true, "local", process_region_bytes);
  const RemoteRegion remote = target.region(GetParam());
  const std::array<Slice, 1> all{Slice{0, 0, process_region_bytes}};
  std::uint64_t cookie = 0;
  std::size_t taken = 0;
  const auto keep_busy = [&] {
    WorkItem work;
    work.op = Op::read;
    work.cookie = ++cookie;
    work.local = local;
    work.remote = &remote;
    work.slices = range_of(all);
    taken += a.port().post(channel, {&work, 1});
    return false;
  };
  step_until({&a}, [&] { return keep_busy() || a.ended.size() > 20; });
  ASSERT_GT(a.ended.size(), 20u);
  ASSERT_TRUE(a.ended[1].is_ok()) << a.ended[1].to_string();
  EXPECT_EQ(std::count(local->data, local->data + local->size, process_pattern),
            static_cast<std::ptrdiff_t>(local->size));

  target.kill();
  EXPECT_TRUE(step_until(
      {&a}, [&] { return keep_busy() || a.events.downs.contains(channel); }, seconds(1)));
  EXPECT_TRUE(step_until(
      {&a}, [&] { return a.ended.size() == taken; }, seconds(1)))
      << "every item ends";
  for (const auto& [number, status] : a.ended)
    EXPECT_TRUE(status.is_ok() || status == Errc::channel_error) << status.to_string();
}

INSTANTIATE_TEST_SUITE_P(Memory, ShmProcesses, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "foreign" : "memfd"; });

TEST(ShmProcess, AKilledInitiatorReleasesWhatItWasCopying) {
  Side b(2);
  const RegionRecord* region = b.allocate("kv", 8 << 20);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ShmConfig config;
    config.copy_threads = 1;
    Side a(1, config);
    const RegionRecord* local = a.make(true, "local", 8 << 20);
    const RemoteRegion remote = seen_by_peer(*region);
    const Result<ChannelId> channel = a.port().open(spec_for(b.port().address(), 2));
    const std::array<Slice, 1> all{Slice{0, 0, 8 << 20}};
    WorkItem work;
    work.op = Op::write;
    work.local = local;
    work.remote = &remote;
    work.slices = range_of(all);
    std::memset(local->data, 0xee, local->size);
    for (std::array<Completion, 16> done;;) {
      work.cookie++;
      a.port().post(channel.is_ok() ? *channel : 0, {&work, 1});
      a.port().poll(done);
    }
  }
  ASSERT_TRUE(step_until({&b}, [&] { return region->data[0] == std::byte{0xee}; }));
  ::kill(child, SIGKILL);
  ASSERT_TRUE(b.regions().retire(region->key).is_ok());
  EXPECT_TRUE(step_until(
      {&b}, [&] { return b.port().release_region(region->key, false); }, seconds(1)));
  std::memset(region->data, 0x11, region->size);
  ::waitpid(child, nullptr, 0);
  for (int i = 0; i < 100; ++i) b.poll();
  EXPECT_EQ(std::count(region->data, region->data + region->size, std::byte{0x11}),
            static_cast<std::ptrdiff_t>(region->size));
}

TEST(ShmProcess, AnotherUserGetsAllocatedMemoryAndIsRefusedForeign) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  ForkedTarget target;
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(10);
    Side a(1);
    const Result<ChannelId> channel = a.port().open(spec_for(target.address(), 2));
    if (!channel) ::_exit(11);
    if (!step_until({&a}, [&] { return !a.events.ups.empty(); })) ::_exit(12);
    const RegionRecord* local = a.make(true, "local", 4096);
    const std::array<Slice, 1> all{Slice{0, 0, 4096}};
    for (const bool foreign : {false, true}) {
      const RemoteRegion remote = target.region(foreign);
      WorkItem work;
      work.op = Op::read;
      work.cookie = foreign ? 2 : 1;
      work.local = local;
      work.remote = &remote;
      work.slices = range_of(all);
      if (a.port().post(*channel, {&work, 1}) != 1) ::_exit(13);
      if (!step_until({&a}, [&] { return a.ended.contains(work.cookie); })) ::_exit(14);
    }
    if (!a.ended[1].is_ok() || local->data[4095] != process_pattern) ::_exit(15);
    if (!(a.ended[2] == Errc::no_path) || a.ended[2].text().find("another user") == std::string_view::npos) ::_exit(16);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "see the child's exit codes";
}

// ---------------------------------------------------------------- copy kernels

/// Every kernel of this processor, and the cached copy without a name.
std::vector<shm::StreamKernel> all_kernels() {
  std::vector<shm::StreamKernel> kernels(shm::stream_kernels().begin(), shm::stream_kernels().end());
  kernels.push_back({"cached", nullptr});
  return kernels;
}

void copy_with(const shm::StreamKernel& kernel, std::span<const CopyPiece> pieces) {
  if (kernel.lines != nullptr)
    shm::stream_copy(pieces, kernel.lines);
  else
    shm_copy(pieces, CopyKind::cached);
}

TEST(ShmCopy, AllAlignmentsAndShortLengths) {
  const auto source = random_bytes(2048, 1);
  for (const shm::StreamKernel& kernel : all_kernels()) {
    alignas(64) std::array<std::byte, 512> target;
    std::array<std::byte, 512> expected;
    for (std::size_t to = 0; to < 64; ++to)
      for (std::size_t length = 0; length <= 300; ++length) {
        const std::size_t from = (to * 7 + length) % 64;
        target.fill(std::byte{0xcc});
        expected.fill(std::byte{0xcc});
        std::memcpy(expected.data() + to, source.data() + from, length);
        const CopyPiece piece{target.data() + to, source.data() + from, length};
        copy_with(kernel, {&piece, 1});
        ASSERT_EQ(std::memcmp(target.data(), expected.data(), target.size()), 0)
            << kernel.name << ": " << length << " bytes from offset " << from << " to " << to;
      }
  }
}

TEST(ShmCopy, LongPiecesOfAnyAlignmentNextToEachOther) {
  constexpr std::size_t size = 200'000;
  const auto source = random_bytes(size, 2);
  std::mt19937_64 random(3);
  for (const shm::StreamKernel& kernel : all_kernels()) {
    for (int round = 0; round < 8; ++round) {
      std::vector<std::byte> target(size, std::byte{0xcc});
      std::vector<std::byte> expected = target;
      std::vector<CopyPiece> pieces;
      for (std::size_t at = random() % 64; at < size;) {
        const std::size_t length = std::min<std::size_t>(random() % (round % 2 == 0 ? 3'000 : 60'000), size - at);
        const std::size_t from = random() % (size - length + 1);
        pieces.push_back({target.data() + at, source.data() + from, length});
        std::copy_n(source.begin() + from, length, expected.begin() + at);
        at += length + random() % 3;
      }
      std::shuffle(pieces.begin(), pieces.end(), random);
      copy_with(kernel, pieces);
      ASSERT_EQ(target, expected) << kernel.name << " round " << round;
    }
  }
}

TEST(ShmCopy, TheRuleFollowsTheSizeOfTheTransfer) {
  EXPECT_EQ(choose_copy(1 << 20, 4 << 20), CopyKind::cached);
  EXPECT_EQ(choose_copy(4 << 20, 4 << 20), CopyKind::streaming);
  EXPECT_EQ(choose_copy(1ull << 40, 0), CopyKind::cached);
  EXPECT_FALSE(streaming_kernel_name().empty());
}

}  // namespace
}  // namespace kvferry
