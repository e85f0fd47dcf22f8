// What a target's transport itself holds of a lease, whatever the initiator checks: its holder, its end, and,
// where its CPU takes part, its ranges.
#include <kvferry/transports/shm/shm_transport.hpp>
#include <kvferry/transports/tcp/tcp_transport.hpp>

#include "tests/transports/contract_fixture.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t region_bytes = 64 << 10;
constexpr ByteRange leased_range{4096, 8192};

class LeaseContract : public ContractTest {
 protected:
  std::shared_ptr<const RegionRecord> add_lease(std::uint64_t holder, Duration time) {
    auto terms = std::make_unique<LeaseTerms>();
    terms->region = region;
    terms->holder = holder;
    terms->ranges = RangeSet({leased_range});
    terms->end = Clock::now() + time;
    auto record = std::make_unique<RegionRecord>();
    record->name = "lease-" + std::to_string(++leases);
    record->data = region->data;
    record->size = region->size;
    record->memfd = region->memfd;
    record->access = Access::read_write;
    record->lease = std::move(terms);
    return target.add_region(std::move(record));
  }

  Status write(ChannelId channel, const RegionRecord& lease, const Slice& slice) {
    return transfer(channel, Op::write, *local, target.remote_view(lease), {&slice, 1});
  }

  std::shared_ptr<const RegionRecord> add_leasable() {
    auto record = allocate_region("kv", region_bytes, Access::none).value();
    record->leasable = Access::read_write;
    return target.add_region(std::move(record));
  }

  std::shared_ptr<const RegionRecord> region = add_leasable();
  std::shared_ptr<const RegionRecord> local = initiator.add_region("local", region_bytes);
  int leases = 0;
};

TEST_P(LeaseContract, HolderReadsAndWritesWhatIsLeased) {
  const auto lease = add_lease(session, 1h);
  fill_random(*local);
  const ChannelId channel = open_channel();
  const Slice slice{0, leased_range.offset, leased_range.length};
  EXPECT_TRUE(write(channel, *lease, slice));
  EXPECT_EQ(std::memcmp(region->data + leased_range.offset, local->data, leased_range.length), 0);
  const Slice back{leased_range.length, leased_range.offset, leased_range.length};
  EXPECT_TRUE(transfer(channel, Op::read, *local, target.remote_view(*lease), {&back, 1}));
  EXPECT_EQ(std::memcmp(local->data, local->data + leased_range.length, leased_range.length), 0);
}

TEST_P(LeaseContract, AnotherSessionIsRefused) {
  const auto lease = add_lease(session + 1, 1h);
  fill_random(*local);
  const ChannelId channel = open_channel();
  const Slice slice{0, leased_range.offset, leased_range.length};
  EXPECT_EQ(write(channel, *lease, slice).code(), Errc::access_denied);
  const std::vector<std::byte> zeros(leased_range.length);
  EXPECT_EQ(std::memcmp(region->data + leased_range.offset, zeros.data(), zeros.size()), 0);
}

TEST_P(LeaseContract, AfterItsEndItIsRefused) {
  const auto lease = add_lease(session, -1ms);
  fill_random(*local);
  const ChannelId channel = open_channel();
  const Slice slice{0, leased_range.offset, leased_range.length};
  const Status status = write(channel, *lease, slice);
  EXPECT_EQ(status.code(), Errc::access_denied);
  EXPECT_NE(status.text().find("ended"), std::string_view::npos) << status.text();
}

TEST_P(LeaseContract, TheTargetsCpuRefusesWhatIsNotLeased) {
  if (!GetParam().target_checks) GTEST_SKIP() << "the initiator's engine checks the ranges alone";
  const auto lease = add_lease(session, 1h);
  fill_random(*local);
  const ChannelId channel = open_channel();
  const std::vector<std::byte> before(region->data, region->data + region->size);
  const std::uint64_t first = leased_range.offset;
  const std::uint64_t end = leased_range.offset + leased_range.length;
  for (const Slice& outside : {Slice{0, first - 1, 1}, Slice{0, first - 1, 2}, Slice{0, end, 1}, Slice{0, end - 1, 2},
                               Slice{0, 0, region_bytes}, Slice{0, first, leased_range.length + 1}})
    EXPECT_EQ(write(channel, *lease, outside).code(), Errc::access_denied)
        << outside.remote_offset << " + " << outside.length;
  EXPECT_EQ(std::memcmp(region->data, before.data(), before.size()), 0);
  const Slice last{0, end - 1, 1};
  EXPECT_TRUE(write(channel, *lease, last));
}

INSTANTIATE_TEST_SUITE_P(
    Transports, LeaseContract,
    testing::Values(ContractParam{.name = "tcp", .make = [] { return make_tcp_transport(TcpConfig{}); }},
                    ContractParam{
                        .name = "shm", .make = [] { return make_shm_transport(ShmConfig{}); }, .target_checks = false}),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace kvferry::test
