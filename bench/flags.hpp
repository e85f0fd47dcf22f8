// The command line of transfer_bench.
#pragma once

#include "bench/options.hpp"

namespace kvferry::bench {

/// Exit statuses of transfer_bench.
enum ExitCode : int {
  exit_ok = 0,
  exit_failed = 1,  ///< something did not work, or bytes were wrong
  exit_usage = 2,   ///< a flag is wrong
  exit_interrupted = 130
};

/// Parses the command line. Prints the help and exits with 0 when asked for it; exits with 2 after a
/// message for a flag that does not exist or whose value has the wrong type.
FlagValues parse_flags(int argc, char** argv);

}  // namespace kvferry::bench
