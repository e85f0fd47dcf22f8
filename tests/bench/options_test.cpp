// Flags: what is accepted, and that every wrong value is an error that names its flag.
#include "bench/options.hpp"

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "bench/kv_model.hpp"
#include "bench/sizes.hpp"

namespace kvferry::bench {
namespace {

TEST(Sizes, SuffixesArePowersOf1024) {
  const std::vector<std::pair<std::string, std::uint64_t>> cases = {
      {"0", 0},      {"1", 1},           {"4096", 4096},     {"4K", 4096},       {"4k", 4096},       {"4KiB", 4096},
      {"4kb", 4096}, {" 1M ", 1u << 20}, {"2G", 2ull << 30}, {"1T", 1ull << 40}, {"7MiB", 7u << 20},
  };
  for (const auto& [text, expected] : cases) {
    const auto size = parse_size(text);
    ASSERT_TRUE(size.is_ok()) << text << ": " << size.status().to_string();
    EXPECT_EQ(*size, expected) << text;
  }
}

TEST(Sizes, AnythingElseIsRefusedAndNamed) {
  for (const std::string text :
       {"", "K", "-1", "+1", "1.5M", "4X", "4KK", "4K x", "99999999999999999999", "20000000T"}) {
    const auto size = parse_size(text);
    ASSERT_FALSE(size.is_ok()) << text;
    EXPECT_NE(size.status().text().find("'" + text + "'"), std::string::npos) << size.status().to_string();
  }
}

TEST(Sizes, ListsKeepTheirOrder) {
  const auto sizes = parse_size_list("1M, 4K,64K");
  ASSERT_TRUE(sizes.is_ok());
  EXPECT_EQ(*sizes, (std::vector<std::uint64_t>{1 << 20, 4096, 65536}));
  EXPECT_FALSE(parse_size_list("4K,,64K").is_ok());
  EXPECT_FALSE(parse_size_list("4K,").is_ok());
  EXPECT_FALSE(parse_size_list("").is_ok());
}

TEST(Sizes, FormattingLosesNothing) {
  for (const std::uint64_t bytes :
       {0ull, 1ull, 1000ull, 1023ull, 1024ull, 1025ull, 65536ull, 3ull << 20, 1ull << 40, 5ull << 50}) {
    const auto back = parse_size(format_size(bytes));
    ASSERT_TRUE(back.is_ok()) << format_size(bytes);
    EXPECT_EQ(*back, bytes);
  }
  EXPECT_EQ(format_size(65536), "64K");
}

TEST(Options, TheBareCommandIsAShortVerifiedSweepOfBothProcesses) {
  const auto options = make_options({});
  ASSERT_TRUE(options.is_ok()) << options.status().to_string();
  EXPECT_EQ(options->mode, Mode::both);
  EXPECT_TRUE(options->verify);
  EXPECT_FALSE(options->trace);
  const auto cases = make_cases(*options);
  EXPECT_EQ(cases.size(), 12u);
  EXPECT_LE(options->limits.seconds * static_cast<double>(cases.size()), 10);
}

TEST(Options, SweepsEveryCombination) {
  FlagValues values;
  values.op = "write,sendrecv";
  values.block_size = "4K,8K";
  values.batch_size = "1,2,3";
  values.concurrency = 5;
  const auto options = make_options(values);
  ASSERT_TRUE(options.is_ok()) << options.status().to_string();
  const auto cases = make_cases(*options);
  ASSERT_EQ(cases.size(), 12u);
  EXPECT_EQ(cases.front().op, BenchOp::write);
  EXPECT_EQ(cases.back().op, BenchOp::sendrecv);
  EXPECT_EQ(cases.back().workload.block_size, 8192u);
  EXPECT_EQ(cases.back().workload.batch_size, 3u);
  EXPECT_EQ(cases.back().workload.parts, 5u);
  EXPECT_EQ(region_bytes_for(cases), 8192u * 3 * 2 * 5);
}

TEST(Options, IterationsAloneHaveNoTimeLimit) {
  FlagValues values;
  values.iterations = 7;
  const auto options = make_options(values);
  ASSERT_TRUE(options.is_ok());
  EXPECT_EQ(options->limits.trips, 7u);
  EXPECT_EQ(options->limits.seconds, 0);
}

struct WrongFlag {
  std::string flag;  ///< that the error must name
  std::function<void(FlagValues&)> set;
};

class WrongFlags : public testing::TestWithParam<WrongFlag> {};

TEST_P(WrongFlags, IsAnErrorThatNamesTheFlag) {
  FlagValues values;
  GetParam().set(values);
  const auto options = make_options(values);
  ASSERT_FALSE(options.is_ok());
  EXPECT_EQ(options.status().code(), Errc::invalid_argument);
  EXPECT_TRUE(options.status().text().starts_with("--" + GetParam().flag + ": ")) << options.status().text();
}

const WrongFlag wrong_flags[] = {
    {"mode", [](FlagValues& v) { v.mode = "server"; }},
    {"output", [](FlagValues& v) { v.output = "xml"; }},
    {"pattern", [](FlagValues& v) { v.pattern = "zigzag"; }},
    {"op", [](FlagValues& v) { v.op = "read,copy"; }},
    {"op", [](FlagValues& v) { v.op = "read,"; }},
    {"transport", [](FlagValues& v) { v.transport = "carrier-pigeon"; }},
    {"transport", [](FlagValues& v) { v.transport = "cuda"; }},
    {"device-name", [](FlagValues& v) { v.transport = "tcp", v.device_name = "mlx5_0"; }},
    {"connect", [](FlagValues& v) { v.connect = "mail"; }},
    {"connect", [](FlagValues& v) { v.transport = "tcp", v.connect = "rdmacm"; }},
    {"num-qp", [](FlagValues& v) { v.num_qp = 0; }},
    {"num-qp", [](FlagValues& v) { v.num_qp = 17; }},
    {"num-qp", [](FlagValues& v) { v.transport = "shm", v.num_qp = 4; }},
    {"gid-index", [](FlagValues& v) { v.gid_index = -2; }},
    {"gid-index", [](FlagValues& v) { v.gid_index = 1024; }},
    {"gid-index", [](FlagValues& v) { v.transport = "tcp", v.gid_index = 0; }},
    {"floor", [](FlagValues& v) { v.transport = "verbs", v.floor = true; }},
    {"memory", [](FlagValues& v) { v.memory = "cuda"; }},
    {"block-size", [](FlagValues& v) { v.block_size = "4K,big"; }},
    {"block-size", [](FlagValues& v) { v.block_size = "0"; }},
    {"block-size", [](FlagValues& v) { v.block_size = "1T"; }},
    {"block-size", [](FlagValues& v) { v.block_size = "16777215T"; }},
    {"block-size", [](FlagValues& v) { v.op = "sendrecv", v.block_size = "65537"; }},
    {"batch-size", [](FlagValues& v) { v.batch_size = "0"; }},
    {"batch-size", [](FlagValues& v) { v.batch_size = "1G"; }},
    {"batch-size", [](FlagValues& v) { v.batch_size = "-4"; }},
    {"duration", [](FlagValues& v) { v.duration = -1; }},
    {"duration", [](FlagValues& v) { v.duration = std::numeric_limits<double>::quiet_NaN(); }},
    {"duration", [](FlagValues& v) { v.duration = std::numeric_limits<double>::infinity(); }},
    {"iterations", [](FlagValues& v) { v.iterations = -1; }},
    {"rounds", [](FlagValues& v) { v.rounds = 0; }},
    {"concurrency", [](FlagValues& v) { v.concurrency = 0; }},
    {"concurrency", [](FlagValues& v) { v.concurrency = 100'000; }},
    {"num-rails", [](FlagValues& v) { v.num_rails = 0; }},
    {"num-rails", [](FlagValues& v) { v.num_rails = 17; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator"; }},
    {"remote-endpoint", [](FlagValues& v) { v.remote_endpoint = "tcp://127.0.0.1:1"; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator", v.remote_endpoint = "127.0.0.1:1"; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator", v.remote_endpoint = "tcp://127.0.0.1"; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator", v.remote_endpoint = "tcp://127.0.0.1:0"; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator", v.remote_endpoint = "tcp://:99"; }},
    {"remote-endpoint", [](FlagValues& v) { v.mode = "initiator", v.remote_endpoint = "tcp://a:70000"; }},
    {"local-endpoint", [](FlagValues& v) { v.local_endpoint = "tcp://127.0.0.1:0"; }},
    {"local-endpoint", [](FlagValues& v) { v.mode = "target", v.local_endpoint = "udp://127.0.0.1:0"; }},
    {"model", [](FlagValues& v) { v.trace = "t", v.model = "gpt-2"; }},
    {"speed", [](FlagValues& v) { v.trace = "t", v.speed = -1; }},
    {"trace-requests", [](FlagValues& v) { v.trace = "t", v.trace_requests = -1; }},
    {"prefill-pool", [](FlagValues& v) { v.trace = "t", v.prefill_pool = "1M"; }},
    {"decode-cache", [](FlagValues& v) { v.trace = "t", v.decode_cache = "lots"; }},
    {"ttft-ms", [](FlagValues& v) { v.trace = "t", v.ttft_ms = -1; }},
    {"ttft-us-per-token", [](FlagValues& v) { v.trace = "t", v.ttft_us_per_token = -1; }},
    {"op", [](FlagValues& v) { v.trace = "t", v.op = "write"; }},
    {"floor", [](FlagValues& v) { v.trace = "t", v.floor = true; }},
    {"concurrency", [](FlagValues& v) { v.trace = "t", v.concurrency = 2; }},
    {"trace", [](FlagValues& v) { v.trace = "t", v.mode = "target"; }},
};

INSTANTIATE_TEST_SUITE_P(Options, WrongFlags, testing::ValuesIn(wrong_flags),
                         [](const auto& info) { return "case_" + std::to_string(info.index); });

TEST(Options, TheErrorForATransportListsWhatExists) {
  FlagValues values;
  values.transport = "cuda";
  const auto options = make_options(values);
  ASSERT_FALSE(options.is_ok());
  for (const char* name : {"cuda", "auto", "shm", "verbs", "tcp"}) {
    EXPECT_NE(options.status().text().find(name), std::string::npos) << options.status().text();
  }
}

TEST(Options, TheEngineIsTold) {
  FlagValues values;
  values.transport = "tcp";
  values.num_rails = 3;
  const auto options = make_options(values);
  ASSERT_TRUE(options.is_ok());
  const EngineConfig config = make_engine_config(*options);
  EXPECT_EQ(config.transports, std::vector<std::string>{"tcp"});
  EXPECT_EQ(config.rails, 3);
  EXPECT_TRUE(make_engine_config(*make_options({})).transports.empty());
}

TEST(Options, TheEngineIsToldOfQueuePairs) {
  FlagValues values;
  values.transport = "verbs";
  values.connect = "rdmacm";
  values.num_qp = 5;
  values.gid_index = 0;
  const EngineConfig config = make_engine_config(*make_options(values));
  EXPECT_EQ(config.verbs.connect, VerbsConnect::rdmacm);
  EXPECT_EQ(config.verbs.queue_pairs, 5);
  EXPECT_EQ(config.verbs.gid_index, 0);
  const VerbsConfig plain = make_engine_config(*make_options({})).verbs;
  EXPECT_EQ(plain.connect, VerbsConfig().connect);
  EXPECT_EQ(plain.queue_pairs, VerbsConfig().queue_pairs);
  EXPECT_EQ(plain.gid_index, VerbsConfig().gid_index);
}

TEST(Models, BytesPerTokenAreThePublishedOnes) {
  EXPECT_EQ(find_model("llama-3.1-8b")->bytes_per_token(), 128u * 1024);
  EXPECT_EQ(find_model("llama-3.1-70b-tp8")->bytes_per_token(), 320u * 1024 / 8);
  EXPECT_EQ(find_model("qwen3-32b")->bytes_per_token(), 256u * 1024);
  EXPECT_NEAR(static_cast<double>(find_model("deepseek-v3")->bytes_per_token()) / 1024, 68.6, 0.05);
}

TEST(Models, BlocksAreThePublishedOnes) {
  EXPECT_EQ(find_model("llama-3.1-8b")->block_bytes(), 32u * 1024);
  EXPECT_EQ(find_model("llama-3.1-70b-tp8")->block_bytes(), 4u * 1024);
  EXPECT_EQ(find_model("deepseek-v3")->block_bytes(), 72u * 1024);
  for (const KvModel& model : known_models()) {
    EXPECT_EQ(model.page_bytes(), model.bytes_per_token() * model.block_tokens) << model.name;
  }
}

}  // namespace
}  // namespace kvferry::bench
