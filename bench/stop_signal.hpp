// Ctrl-C and SIGTERM as a flag that loops look at.
#pragma once

#include <atomic>

namespace kvferry::bench {

/// Set by SIGINT and SIGTERM once catch_stop_signals() was called; a second signal kills as usual.
extern std::atomic<bool> stop_requested;

void catch_stop_signals();

}  // namespace kvferry::bench
