// What transfer_bench was asked to do, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>

#include "bench/kv_model.hpp"
#include "bench/workload.hpp"

namespace kvferry::bench {

/// The flags as typed, before any check. The defaults are those of the command line.
struct FlagValues {
  std::string mode = "both";
  std::string local_endpoint;
  std::string remote_endpoint;
  std::string device_name;
  std::string connect = "bootstrap";
  std::int64_t num_qp = 2;
  std::int64_t gid_index = -1;
  std::string transport = "auto";
  std::string op;
  std::string block_size;
  std::string batch_size;
  double duration = 0;
  std::int64_t iterations = 0;
  std::int64_t rounds = 5;
  std::int64_t concurrency = 1;
  std::int64_t num_rails = 1;
  std::string memory = "host";
  std::string pattern = "random";
  std::uint64_t seed = 1;
  bool verify = true;
  bool floor = false;
  std::string output = "text";
  bool progress = false;

  std::string trace;
  std::string model = "llama-3.1-8b";
  double speed = 1;
  std::int64_t trace_requests = 0;
  std::string prefill_pool = "1G";
  std::string decode_cache = "1G";
  double ttft_ms = 200;
  double ttft_us_per_token = 40;
};

enum class Mode : std::uint8_t { both, target, initiator };
enum class Output : std::uint8_t { text, json, csv };
enum class BenchOp : std::uint8_t { read, write, write_imm, sendrecv };

std::string_view to_string(Mode mode) noexcept;
std::string_view to_string(BenchOp op) noexcept;
Result<BenchOp> parse_op(std::string_view text);

/// When the timed part of something ends: at the first limit reached.
struct TripLimits {
  double seconds = 0;       ///< 0: no limit
  std::uint64_t trips = 0;  ///< 0: no limit
};

struct TraceOptions {
  std::string file;
  KvModel model;
  double speed = 1;                ///< times as fast as recorded; 0: without pauses
  std::uint64_t requests = 0;      ///< most requests; 0: all
  double seconds = 0;              ///< most seconds; 0: no limit
  std::uint64_t prefill_pool = 0;  ///< bytes
  std::uint64_t decode_cache = 0;  ///< bytes
  double ttft_ms = 0;
  double ttft_us_per_token = 0;
};

struct BenchOptions {
  Mode mode = Mode::both;
  std::string local_endpoint;  ///< empty: chosen to suit the other side
  std::string remote_endpoint;
  std::string transport;             ///< "auto" or a transport's name
  std::vector<std::string> devices;  ///< RDMA devices to use; empty: every one
  VerbsConnect connect = VerbsConnect::bootstrap;
  int num_qp = 2;
  int gid_index = -1;
  std::vector<BenchOp> ops;
  std::vector<std::uint64_t> block_sizes;
  std::vector<std::uint32_t> batch_sizes;
  TripLimits limits;  ///< of one case's timed trips, all rounds together
  std::uint32_t rounds = 1;
  std::uint32_t concurrency = 1;
  int num_rails = 1;
  Pattern pattern = Pattern::random;
  std::uint64_t seed = 1;
  bool verify = true;
  bool floor = false;
  Output output = Output::text;
  bool progress = false;
  std::optional<TraceOptions> trace;
};

/// Checks every value and the way they go together; the error names the flag.
Result<BenchOptions> make_options(const FlagValues& values);

/// One row of the sweep.
struct BenchCase {
  BenchOp op = BenchOp::read;
  Workload workload;
};

/// All cases, in the order in which they are run.
std::vector<BenchCase> make_cases(const BenchOptions& options);

/// Bytes that each side's region needs for every case of the sweep.
std::uint64_t region_bytes_for(const std::vector<BenchCase>& cases) noexcept;

/// The engine's configuration for these options (name and listen address excepted).
EngineConfig make_engine_config(const BenchOptions& options);

}  // namespace kvferry::bench
