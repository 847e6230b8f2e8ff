// The one assertion of the C++ tests.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << "FAILED: " << what << '\n';
  std::exit(1);
}
