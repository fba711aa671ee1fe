# Writes the SHA-256 of LIBRARY beside it: library.py loads no library that has another one.
file(SHA256 ${LIBRARY} DIGEST)
string(REGEX REPLACE "[.]so$" ".sha256" FILE ${LIBRARY})
file(WRITE ${FILE} "${DIGEST}\n")
