
// Every decision of the planner, and what follows from it. Sizes are bytes where a name ends in Bytes or Offset.
struct Cfg {
    static constexpr u32 kProgramId = ${spec.program_id | hex32};  // how this program names itself in a wait record
//% for constant in spec.constants
//% set type, name, value = constant.value | cpp_type, constant.name | ident, constant.value | literal
    static constexpr ${type} ${name} = ${value};  // ${constant.comment | comment}
//% endfor
};
