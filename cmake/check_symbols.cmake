# Fails where OBJECT defines any symbol that other objects see but TABLE.
execute_process(COMMAND ${NM} --defined-only --extern-only ${OBJECT} OUTPUT_VARIABLE LINES RESULT_VARIABLE CODE)
if(CODE)
  message(FATAL_ERROR "${NM} cannot read ${OBJECT}.")
endif()
string(REPLACE "\n" ";" LINES "${LINES}")
foreach(line ${LINES})
  if(NOT line MATCHES " ${TABLE}$")
    message(FATAL_ERROR "${OBJECT} defines a symbol besides ${TABLE}: ${line}. Objects of other instruction sets could "
                        "come to use it; make it static, or put it in an unnamed namespace.")
  endif()
endforeach()
