// Stands where libFuzzer is not: gives LLVMFuzzerTestOneInput random bytes.
//
//     core_fuzz [RUNS [FIRST]]     RUNS inputs, 1,000 by default, made from the seeds FIRST,
//     FIRST+1...
//
// When one fails, its seed is told.
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

unsigned long seed = 0;
bool done = false;

void tell_seed() {
  if (!done) std::fprintf(stderr, "again: core_fuzz 1 %lu\n", seed);
  done = true;
}

void tell_seed_of_abort(int signal) {
  tell_seed();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned long runs = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1000;
  const unsigned long first = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1;
  std::atexit(tell_seed);
  std::signal(SIGABRT, tell_seed_of_abort);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(tell_seed);
#endif
  for (seed = first; seed < first + runs; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint8_t> bytes(random() % 3000);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  done = true;
  std::cout << "core_fuzz: " << runs << " random inputs\n";
}
