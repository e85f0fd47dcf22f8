#include "bench/options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <fmt/core.h>
#include <unistd.h>

#include <kvferry/transports/transport.hpp>

#include "bench/sizes.hpp"

namespace kvferry::bench {
namespace {

constexpr std::array transports = {"shm", "verbs", "tcp"};
constexpr std::uint64_t max_batch = 1u << 24;
constexpr std::int64_t max_concurrency = 1024;
constexpr std::int64_t max_rounds = 1000;
constexpr std::int64_t max_rails = 16;
constexpr std::int64_t max_queue_pairs = 16;
constexpr std::int64_t max_gid_index = 1023;
constexpr double default_case_seconds = 0.4;
constexpr double default_trace_seconds = 10;

Status wrong(std::string_view flag, std::string_view why) {
  return {Errc::invalid_argument, fmt::format("--{}: {}", flag, why)};
}

Status wrong(std::string_view flag, const Status& why) { return wrong(flag, why.text()); }

Status require_range(std::string_view flag, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return Status::ok();
  return wrong(flag, fmt::format("{} is not within {} to {}", value, least, most));
}

Status require_not_negative(std::string_view flag, double value) {
  if (std::isfinite(value) && value >= 0) return Status::ok();
  return wrong(flag, fmt::format("{} is not a number of at least 0", value));
}

template <class T, std::size_t N>
Result<T> one_of(std::string_view flag, std::string_view value,
                 const std::array<std::pair<std::string_view, T>, N>& choices) {
  std::string names;
  for (const auto& [name, choice] : choices) {
    if (name == value) return choice;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  }
  return wrong(flag, fmt::format("'{}' is none of {}", value, names));
}

/// tcp://HOST:PORT, with a port from 0 (where a free one may be taken) or 1.
Status require_endpoint(std::string_view flag, std::string_view text, int least_port) {
  constexpr std::string_view scheme = "tcp://";
  const auto bad = [&](std::string_view why) {
    return wrong(flag, fmt::format("'{}' is not of the form tcp://HOST:PORT: {}", text, why));
  };
  if (text.substr(0, scheme.size()) != scheme) return bad("it does not start with tcp://");
  const std::string_view rest = text.substr(scheme.size());
  const auto colon = rest.rfind(':');
  if (colon == std::string_view::npos) return bad("there is no port");
  if (colon == 0) return bad("there is no host");
  const std::string_view port_text = rest.substr(colon + 1);
  int port = -1;
  const auto [end, error] = std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
  if (error != std::errc() || end != port_text.data() + port_text.size() || port < least_port || port > 65535) {
    return bad(fmt::format("the port is not a number within {} to 65535", least_port));
  }
  return Status::ok();
}

Status check_endpoints(const FlagValues& values, Mode mode) {
  if (!values.local_endpoint.empty()) {
    if (mode == Mode::both) return wrong("local-endpoint", "only for --mode target or initiator");
    if (auto status = require_endpoint("local-endpoint", values.local_endpoint, 0); !status) return status;
  }
  if (mode != Mode::initiator) {
    if (values.remote_endpoint.empty()) return Status::ok();
    return wrong("remote-endpoint", "only for --mode initiator; this one has no target to connect to");
  }
  if (values.remote_endpoint.empty()) {
    return wrong("remote-endpoint", "--mode initiator needs the address that the target printed (tcp://HOST:PORT)");
  }
  return require_endpoint("remote-endpoint", values.remote_endpoint, 1);
}

Result<VerbsConnect> parse_connect(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, VerbsConnect>, 2> choices = {
      {{"bootstrap", VerbsConnect::bootstrap}, {"rdmacm", VerbsConnect::rdmacm}}};
  return one_of<VerbsConnect>("connect", text, choices);
}

/// The flags that mean something to RDMA only.
Status check_rdma(const FlagValues& values) {
  if (auto connect = parse_connect(values.connect); !connect) return connect.status();
  if (auto status = require_range("num-qp", values.num_qp, 1, max_queue_pairs); !status) return status;
  if (auto status = require_range("gid-index", values.gid_index, -1, max_gid_index); !status) return status;
  if (values.transport == "auto" || values.transport == "verbs") return Status::ok();
  const FlagValues defaults;
  const auto useless = [&](std::string_view flag) {
    return wrong(flag, fmt::format("transport {} has no queue pairs; leave the flag out", values.transport));
  };
  if (values.connect != defaults.connect) return useless("connect");
  if (values.num_qp != defaults.num_qp) return useless("num-qp");
  if (values.gid_index != defaults.gid_index) return useless("gid-index");
  return Status::ok();
}

Status check_transport(const FlagValues& values) {
  const auto& wanted = values.transport;
  if (wanted != "auto" && std::find(transports.begin(), transports.end(), wanted) == transports.end()) {
    return wrong("transport", fmt::format("'{}' {}; available are auto, shm, verbs, tcp", wanted,
                                          wanted == "cuda" ? "is not built in" : "is not a transport"));
  }
  if (!values.device_name.empty() && wanted != "auto" && wanted != "verbs") {
    return wrong("device-name", fmt::format("'{}': transport {} has no devices to choose from; leave the flag out",
                                            values.device_name, wanted));
  }
  if (auto status = check_rdma(values); !status) return status;
  if (values.floor && wanted == "verbs") {
    return wrong("floor", "not measured for verbs: compare with ib_read_bw and ib_write_bw of perftest");
  }
  if (values.memory != "host") {
    return wrong("memory", fmt::format("'{}' memory is not built in; available is host", values.memory));
  }
  return Status::ok();
}

Status check_numbers(const FlagValues& values) {
  for (const auto& status : {
           require_not_negative("duration", values.duration),
           require_range("iterations", values.iterations, 0, INT64_MAX),
           require_range("rounds", values.rounds, 1, max_rounds),
           require_range("concurrency", values.concurrency, 1, max_concurrency),
           require_range("num-rails", values.num_rails, 1, max_rails),
           require_not_negative("speed", values.speed),
           require_range("trace-requests", values.trace_requests, 0, INT64_MAX),
           require_not_negative("ttft-ms", values.ttft_ms),
           require_not_negative("ttft-us-per-token", values.ttft_us_per_token),
       }) {
    if (!status) return status;
  }
  return Status::ok();
}

Result<std::vector<BenchOp>> make_ops(const std::string& text) {
  std::vector<BenchOp> ops;
  for (const std::string& name : split_list(text.empty() ? "read,write" : text)) {
    auto op = parse_op(name);
    if (!op) return wrong("op", op.status());
    ops.push_back(*op);
  }
  return ops;
}

Result<std::vector<std::uint64_t>> make_sizes(std::string_view flag, std::string_view text, std::uint64_t most) {
  auto sizes = parse_size_list(text);
  if (!sizes) return wrong(flag, sizes.status());
  for (const std::uint64_t size : *sizes) {
    if (size == 0) return wrong(flag, "0 moves nothing; write at least 1");
    if (size > most) return wrong(flag, fmt::format("{} is beyond the limit of {}", size, most));
  }
  return sizes;
}

bool has_op(const BenchOptions& options, BenchOp op) {
  return std::find(options.ops.begin(), options.ops.end(), op) != options.ops.end();
}

Status fill_sweep(const FlagValues& values, BenchOptions& options) {
  auto ops = make_ops(values.op);
  if (!ops) return ops.status();
  options.ops = std::move(*ops);
  const bool messages = has_op(options, BenchOp::sendrecv);
  const std::string_view blocks = messages ? "4K,64K" : "4K,64K,1M";
  auto block_sizes = make_sizes("block-size", values.block_size.empty() ? blocks : values.block_size, UINT64_MAX >> 24);
  if (!block_sizes) return block_sizes.status();
  options.block_sizes = std::move(*block_sizes);
  const std::uint64_t largest = *std::max_element(options.block_sizes.begin(), options.block_sizes.end());
  if (messages && largest > max_message_bytes) {
    return wrong("block-size", fmt::format("{} is beyond what one message carries ({} bytes); --op sendrecv needs less",
                                           largest, max_message_bytes));
  }
  const std::string_view batches = messages ? "1,16" : "1,160";
  auto batch_sizes = make_sizes("batch-size", values.batch_size.empty() ? batches : values.batch_size, max_batch);
  if (!batch_sizes) return batch_sizes.status();
  options.batch_sizes.assign(batch_sizes->begin(), batch_sizes->end());
  return Status::ok();
}

/// Refuses what would drive this machine out of memory instead of letting it try.
Status check_memory(const BenchOptions& options) {
  const double largest =
      static_cast<double>(*std::max_element(options.block_sizes.begin(), options.block_sizes.end())) *
      static_cast<double>(*std::max_element(options.batch_sizes.begin(), options.batch_sizes.end())) *
      (options.pattern == Pattern::contiguous ? 1 : 2) * options.concurrency;
  const double sides = options.mode == Mode::both ? 2 : 1;
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (largest * sides <= 0.8 * memory) return Status::ok();
  return wrong("block-size", fmt::format("with this --batch-size and --concurrency the regions need {:.1f} GiB of the "
                                         "{:.1f} GiB of memory; lower one of the three",
                                         largest * sides / (1 << 30), memory / (1 << 30)));
}

Result<std::uint64_t> make_pool(std::string_view flag, std::string_view text, const KvModel& model) {
  auto bytes = parse_size(text);
  if (!bytes) return wrong(flag, bytes.status());
  const std::uint64_t least = model.page_bytes() * (512 / model.block_tokens);
  if (*bytes >= least && *bytes <= (std::uint64_t{1} << 40)) return *bytes;
  return wrong(flag,
               fmt::format("{} does not lie between {} bytes (512 tokens of {}) and 1T", text, least, model.name));
}

Status fill_trace(const FlagValues& values, BenchOptions& options) {
  if (values.trace.empty()) return Status::ok();
  if (options.mode == Mode::target) return wrong("trace", "only the initiator replays a trace");
  if (!values.op.empty() && values.op != "read") {
    return wrong("op", "a trace is replayed with read: the decode side fetches what it does not hold");
  }
  if (options.floor) return wrong("floor", "not measured for a trace; use --block-size and --batch-size");
  if (options.concurrency != 1) return wrong("concurrency", "a trace is replayed one request at a time");
  auto model = find_model(values.model);
  if (!model) return wrong("model", model.status());
  auto prefill = make_pool("prefill-pool", values.prefill_pool, *model);
  if (!prefill) return prefill.status();
  auto decode = make_pool("decode-cache", values.decode_cache, *model);
  if (!decode) return decode.status();
  const bool unlimited = values.duration == 0 && values.trace_requests == 0;
  options.trace = TraceOptions{values.trace,
                               *model,
                               values.speed,
                               static_cast<std::uint64_t>(values.trace_requests),
                               unlimited ? default_trace_seconds : values.duration,
                               *prefill,
                               *decode,
                               values.ttft_ms,
                               values.ttft_us_per_token};
  return Status::ok();
}

Status fill_choices(const FlagValues& values, BenchOptions& options) {
  static constexpr std::array<std::pair<std::string_view, Mode>, 3> modes = {
      {{"both", Mode::both}, {"target", Mode::target}, {"initiator", Mode::initiator}}};
  static constexpr std::array<std::pair<std::string_view, Output>, 3> outputs = {
      {{"text", Output::text}, {"json", Output::json}, {"csv", Output::csv}}};
  auto mode = one_of("mode", values.mode, modes);
  if (!mode) return mode.status();
  auto output = one_of("output", values.output, outputs);
  if (!output) return output.status();
  auto pattern = parse_pattern(values.pattern);
  if (!pattern) return wrong("pattern", pattern.status());
  options.mode = *mode;
  options.output = *output;
  options.pattern = *pattern;
  return Status::ok();
}

void fill_plain(const FlagValues& values, BenchOptions& options) {
  options.local_endpoint = values.local_endpoint;
  options.remote_endpoint = values.remote_endpoint;
  options.transport = values.transport;
  if (!values.device_name.empty()) options.devices = split_list(values.device_name);
  options.connect = *parse_connect(values.connect);
  options.num_qp = static_cast<int>(values.num_qp);
  options.gid_index = static_cast<int>(values.gid_index);
  options.limits.trips = static_cast<std::uint64_t>(values.iterations);
  options.limits.seconds = values.duration == 0 && values.iterations == 0 ? default_case_seconds : values.duration;
  options.rounds = static_cast<std::uint32_t>(values.rounds);
  options.concurrency = static_cast<std::uint32_t>(values.concurrency);
  options.num_rails = static_cast<int>(values.num_rails);
  options.seed = values.seed;
  options.verify = values.verify;
  options.floor = values.floor;
  options.progress = values.progress;
}

}  // namespace

std::string_view to_string(Mode mode) noexcept {
  return mode == Mode::both ? "both" : mode == Mode::target ? "target" : "initiator";
}

std::string_view to_string(BenchOp op) noexcept {
  switch (op) {
    case BenchOp::read:
      return "read";
    case BenchOp::write:
      return "write";
    case BenchOp::write_imm:
      return "write_imm";
    case BenchOp::sendrecv:
      return "sendrecv";
  }
  return "unknown";
}

Result<BenchOp> parse_op(std::string_view text) {
  for (const BenchOp op : {BenchOp::read, BenchOp::write, BenchOp::write_imm, BenchOp::sendrecv}) {
    if (text == to_string(op)) return op;
  }
  return Status(Errc::invalid_argument, fmt::format("'{}' is none of read, write, write_imm, sendrecv", text));
}

Result<BenchOptions> make_options(const FlagValues& values) {
  BenchOptions options;
  if (auto status = fill_choices(values, options); !status) return status;
  if (auto status = check_endpoints(values, options.mode); !status) return status;
  if (auto status = check_transport(values); !status) return status;
  if (auto status = check_numbers(values); !status) return status;
  fill_plain(values, options);
  if (auto status = fill_sweep(values, options); !status) return status;
  if (auto status = check_memory(options); !status) return status;
  if (auto status = fill_trace(values, options); !status) return status;
  return options;
}

std::vector<BenchCase> make_cases(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const BenchOp op : options.ops) {
    for (const std::uint64_t block_size : options.block_sizes) {
      for (const std::uint32_t batch_size : options.batch_sizes) {
        cases.push_back({op, {options.pattern, block_size, batch_size, options.concurrency, options.seed}});
      }
    }
  }
  return cases;
}

std::uint64_t region_bytes_for(const std::vector<BenchCase>& cases) noexcept {
  std::uint64_t most = 0;
  for (const BenchCase& one : cases) most = std::max(most, one.workload.region_bytes());
  return most;
}

EngineConfig make_engine_config(const BenchOptions& options) {
  EngineConfig config;
  if (options.transport != "auto") config.transports = {options.transport};
  config.verbs.devices = options.devices;
  config.verbs.connect = options.connect;
  config.verbs.queue_pairs = options.num_qp;
  config.verbs.gid_index = options.gid_index;
  config.rails = options.num_rails;
  return config;
}

}  // namespace kvferry::bench
