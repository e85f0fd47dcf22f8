#include "bench/flags.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

#include <fmt/core.h>
#include <gflags/gflags.h>

namespace {
const kvferry::bench::FlagValues defaults;
}

DEFINE_string(mode, "both", "both (two processes on this host), target (serves) or initiator (measures)");
DEFINE_string(local_endpoint, "",
              "tcp://HOST:PORT to listen on; port 0 takes a free one. Default: loopback for a target, and for an "
              "initiator the address that faces the target");
DEFINE_string(remote_endpoint, "", "tcp://HOST:PORT that the target printed; for --mode initiator");
DEFINE_string(device_name, "", "RDMA devices to use, best first, separated by commas; empty: every active one");
DEFINE_string(
    connect, "bootstrap",
    "how RDMA queue pairs are connected: bootstrap (over the control connection) or rdmacm (by librdmacm); the "
    "same on both sides");
DEFINE_int64(num_qp, defaults.num_qp, "RDMA queue pairs per rail");
DEFINE_int64(gid_index, defaults.gid_index, "place of the GID in the RDMA port's table; -1 chooses");
DEFINE_string(transport, "auto", "auto (the fastest that both sides can do), shm, verbs or tcp");
DEFINE_string(op, "", "list of read, write, write_imm, sendrecv. Default: read,write");
DEFINE_string(block_size, "",
              "bytes of a block, a value or a list to sweep, with K, M, G. Default: 4K,64K,1M (sendrecv: 4K,64K)");
DEFINE_string(batch_size, "", "blocks in one transfer, a value or a list to sweep. Default: 1,160 (sendrecv: 1,16)");
DEFINE_double(duration, defaults.duration,
              "seconds of timed transfers of one row, or of a whole trace. Default: 0.4 for a row unless "
              "--iterations is given, 10 for a trace unless --trace-requests is given");
DEFINE_int64(iterations, defaults.iterations, "transfers of one row; with --duration, whichever ends first");
DEFINE_int64(rounds, defaults.rounds,
             "parts a row is measured in: each has its own data, is verified, and alternates with the floor");
DEFINE_int64(concurrency, defaults.concurrency, "transfers in flight together, each with its own part of the regions");
DEFINE_int64(num_rails, defaults.num_rails, "rails to the peer");
DEFINE_string(memory, "host", "where the regions lie: host");
DEFINE_string(pattern, "random", "how blocks lie in the regions: contiguous, strided or random");
DEFINE_uint64(seed, defaults.seed, "of the random pattern and of the data");
DEFINE_bool(verify, defaults.verify, "check every byte of every round, and that nothing beside the blocks changed");
DEFINE_bool(floor, defaults.floor,
            "measure the raw speed of this machine on the same slices too, in turn with kvferry, and print the ratio: "
            "1.00 is as fast as the floor. shm: memcpy or streaming stores, the better; tcp: writev and readv over as "
            "many sockets, blocking or polled, the better");
DEFINE_string(output, "text", "text, json (one object a line) or csv");
DEFINE_bool(progress, defaults.progress, "say on standard error what is being measured");
DEFINE_string(
    trace, "",
    "file of JSON lines (timestamp in ms, input_length, output_length, hash_ids for every 512 tokens): replay "
    "the KV transfer of each request instead of a sweep");
DEFINE_string(model, "llama-3.1-8b", "KV cache of the trace: llama-3.1-8b, llama-3.1-70b-tp8, qwen3-32b, deepseek-v3");
DEFINE_double(speed, defaults.speed, "how many times as fast as recorded a trace is replayed; 0: without pauses");
DEFINE_int64(trace_requests, defaults.trace_requests, "most requests of a trace; 0: all");
DEFINE_string(prefill_pool, "1G", "KV memory of the target (prefill side) in a trace; pages are used again in turn");
DEFINE_string(decode_cache, "1G",
              "KV memory of the initiator (decode side) in a trace; blocks of 512 tokens stay until the least recently "
              "used must go, and are not fetched again meanwhile");
DEFINE_double(ttft_ms, defaults.ttft_ms,
              "time to first token that a request is held against: its transfer should take less than 5 % of "
              "ttft_ms + ttft_us_per_token x input tokens");
DEFINE_double(ttft_us_per_token, defaults.ttft_us_per_token,
              "part of the time to first token that grows with the prompt, in microseconds a token");

DECLARE_bool(help);
DECLARE_bool(helpshort);

// gflags leaves with status 1 after a wrong flag; this variable of its library changes how.
namespace GFLAGS_NAMESPACE {
extern void (*gflags_exitfunc)(int);
}

namespace kvferry::bench {
namespace {

constexpr const char* usage =
    "moves KV blocks between two processes, checks every byte, and prints latency and bandwidth.\n"
    "  transfer_bench                                     both processes on this host, a short sweep\n"
    "  transfer_bench --mode target                       prints its address and serves\n"
    "  transfer_bench --mode initiator --remote-endpoint tcp://HOST:PORT\n"
    "Exit status: 0 done; 1 something failed or bytes were wrong; 2 a flag is wrong; 130 interrupted.";

FlagValues collect() {
  FlagValues values;
  values.mode = FLAGS_mode;
  values.local_endpoint = FLAGS_local_endpoint;
  values.remote_endpoint = FLAGS_remote_endpoint;
  values.device_name = FLAGS_device_name;
  values.connect = FLAGS_connect;
  values.num_qp = FLAGS_num_qp;
  values.gid_index = FLAGS_gid_index;
  values.transport = FLAGS_transport;
  values.op = FLAGS_op;
  values.block_size = FLAGS_block_size;
  values.batch_size = FLAGS_batch_size;
  values.duration = FLAGS_duration;
  values.iterations = FLAGS_iterations;
  values.rounds = FLAGS_rounds;
  values.concurrency = FLAGS_concurrency;
  values.num_rails = FLAGS_num_rails;
  values.memory = FLAGS_memory;
  values.pattern = FLAGS_pattern;
  values.seed = FLAGS_seed;
  values.verify = FLAGS_verify;
  values.floor = FLAGS_floor;
  values.output = FLAGS_output;
  values.progress = FLAGS_progress;
  values.trace = FLAGS_trace;
  values.model = FLAGS_model;
  values.speed = FLAGS_speed;
  values.trace_requests = FLAGS_trace_requests;
  values.prefill_pool = FLAGS_prefill_pool;
  values.decode_cache = FLAGS_decode_cache;
  values.ttft_ms = FLAGS_ttft_ms;
  values.ttft_us_per_token = FLAGS_ttft_us_per_token;
  return values;
}

}  // namespace

FlagValues parse_flags(int argc, char** argv) {
  GFLAGS_NAMESPACE::gflags_exitfunc = [](int) { std::exit(exit_usage); };
  gflags::SetUsageMessage(usage);
  gflags::ParseCommandLineNonHelpFlags(&argc, &argv, true);
  if (FLAGS_help || FLAGS_helpshort) {
    gflags::ShowUsageWithFlagsRestrict(argv[0], "bench/flags");
    std::exit(exit_ok);
  }
  if (argc > 1) {
    fmt::print(stderr, "transfer_bench: '{}' is not a flag; every argument begins with --\n", argv[1]);
    std::exit(exit_usage);
  }
  return collect();
}

}  // namespace kvferry::bench
