// The raw ways that kvferry is held against must move every byte themselves, or the ratio is worth nothing.
#include <array>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "bench/data_check.hpp"
#include "bench/floor_service.hpp"
#include "bench/raw_tcp.hpp"
#include "bench/shm_ping.hpp"

namespace kvferry::bench {
namespace {

std::uint64_t bytes_of(std::vector<Share>& shares, std::span<std::byte> region) {
  // Counted by moving them through a pipe one call after the other.
  std::uint64_t bytes = 0;
  int ends[2];
  if (::pipe(ends) != 0) return 0;
  std::vector<std::byte> sink(1 << 16);
  for (Share& share : shares) {
    while (!share.done()) {
      // A pipe holds 64 KiB: what one call puts in is taken out before the next.
      const ssize_t moved = share.move(ends[1], Direction::send);
      if (moved <= 0) return 0;
      for (ssize_t left = moved; left > 0;) left -= ::read(ends[0], sink.data(), sink.size());
      bytes += static_cast<std::uint64_t>(moved);
    }
  }
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_LE(bytes, region.size());
  return bytes;
}

TEST(Shares, CoverEverySliceAndSmallOnesUseFewSockets) {
  std::vector<std::byte> region(1 << 20);
  const std::vector<Slice> small = {{0, 0, 4096}, {8192, 0, 4096}};
  auto shares = make_shares(region, small, Side::local, 4);
  EXPECT_EQ(shares.size(), 1u);
  EXPECT_EQ(bytes_of(shares, region), 8192u);
  const std::vector<Slice> two = {{0, 0, 65'536}, {100'000, 0, 65'535 + 2}};
  shares = make_shares(region, two, Side::local, 4);
  EXPECT_EQ(shares.size(), 2u);
  // The pipe's capacity bounds one call: cut the work into pieces that fit.
  const std::vector<Slice> many(32, Slice{0, 0, 8192});
  shares = make_shares(region, many, Side::local, 4);
  EXPECT_EQ(shares.size(), 4u);
}

using Case = std::tuple<BenchOp, RawMode, std::uint64_t>;

class TcpFloorTrip : public testing::TestWithParam<Case> {};

TEST_P(TcpFloorTrip, MovesEveryByteSeveralTimes) {
  const auto [op, mode, block_size] = GetParam();
  const FloorRequest request{"tcp", op, {Pattern::random, block_size, 50, 1, 9}, 4, mode, 1 << 20};
  std::vector<std::byte> remote(request.workload.region_bytes());
  std::vector<std::byte> local(request.workload.region_bytes());
  auto server = make_floor_server(request, remote, "127.0.0.1");
  ASSERT_TRUE(server.is_ok()) << server.status().to_string();
  auto sockets = RawSockets::connect("127.0.0.1", (*server)->port(), 4, mode, 1 << 20);
  ASSERT_TRUE(sockets.is_ok()) << sockets.status().to_string();
  auto shares = make_shares(local, floor_slices(request.workload), Side::local, 4);
  const bool reads = op == BenchOp::read;
  for (std::uint64_t round = 0; round < 3; ++round) {
    fill_blocks(reads ? remote : local, request.workload, reads ? Side::remote : Side::local, round);
    poison_region(reads ? local : remote, request.workload);
    Status status = reads ? sockets->send_signal() : sockets->transmit(shares, Direction::send);
    ASSERT_TRUE(status.is_ok()) << status.to_string();
    status = reads ? sockets->transmit(shares, Direction::receive) : sockets->receive_signal();
    ASSERT_TRUE(status.is_ok()) << status.to_string();
    const auto mismatch = reads ? verify_region(local, request.workload, Side::local, round)
                                : verify_region(remote, request.workload, Side::remote, round);
    EXPECT_FALSE(mismatch) << mismatch->to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Floor, TcpFloorTrip,
                         testing::Combine(testing::Values(BenchOp::read, BenchOp::write),
                                          testing::Values(RawMode::blocking, RawMode::polled),
                                          testing::Values(1u, 4096u, 100'003u)));

TEST(TcpFloor, AnInitiatorThatVanishesDoesNotHoldTheServer) {
  const FloorRequest request{"tcp", BenchOp::write, {Pattern::random, 4096, 50, 1, 9}, 2, RawMode::blocking, 0};
  std::vector<std::byte> remote(request.workload.region_bytes());
  auto server = make_floor_server(request, remote, "127.0.0.1");
  ASSERT_TRUE(server.is_ok());
  {
    auto sockets = RawSockets::connect("127.0.0.1", (*server)->port(), 2, RawMode::blocking, 0);
    ASSERT_TRUE(sockets.is_ok());
  }
  const auto begin = std::chrono::steady_clock::now();
  server->reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(TcpFloor, NobodyListeningIsAnErrorThatNamesThePort) {
  int port = 0;
  {
    auto listener = RawListener::open("127.0.0.1");
    ASSERT_TRUE(listener.is_ok());
    port = listener->port();
  }
  const auto sockets = RawSockets::connect("127.0.0.1", port, 1, RawMode::blocking, 0);
  ASSERT_FALSE(sockets.is_ok());
  EXPECT_NE(sockets.status().text().find(std::to_string(port)), std::string::npos) << sockets.status().text();
}

TEST(ShmFloor, MessagesComeBack) {
  const FloorRequest request{"shm", BenchOp::sendrecv, {Pattern::random, 1000, 3, 1, 9}, 1, RawMode::blocking, 0};
  std::vector<std::byte> region(request.workload.region_bytes());
  auto server = make_floor_server(request, region, "");
  ASSERT_TRUE(server.is_ok()) << server.status().to_string();
  auto memory = SharedMemory::open(::getpid(), (*server)->memfd(), ShmPing::memory_bytes(3000));
  ASSERT_TRUE(memory.is_ok()) << memory.status().to_string();
  ShmPing ping(std::move(*memory));
  ASSERT_EQ(ping.request_area().size(), 3000u);
  for (std::uint64_t round = 0; round < 3; ++round) {
    fill_block(ping.request_area(), round);
    ASSERT_TRUE(ping.ask().is_ok());
    EXPECT_FALSE(find_difference(ping.reply_area(), round));
  }
}

TEST(SharedMemory, OnlyAMemfdOfTheRightSizeIsTaken) {
  auto memory = SharedMemory::create("test", 4096);
  ASSERT_TRUE(memory.is_ok());
  EXPECT_TRUE(SharedMemory::open(::getpid(), memory->memfd(), 4096).is_ok());
  EXPECT_EQ(SharedMemory::open(::getpid(), memory->memfd(), 4097).status().code(), Errc::out_of_bounds);
  EXPECT_EQ(SharedMemory::open(::getpid(), 0, 1).status().code(), Errc::unsupported);
  EXPECT_EQ(SharedMemory::open(::getpid(), 9999, 1).status().code(), Errc::unsupported);
}

}  // namespace
}  // namespace kvferry::bench
