/* SPDX-License-Identifier: Apache-2.0 */
/* The subcommands of `nybble`. Each is a main() of its own: argv[0] is the subcommand's name, the
 * return value the exit code: 0, 1 for a check that failed or a file that could not be used, 2 for
 * bad usage (argp_err_exit_status = 2). They use the public header only. */
#ifndef NYBBLE_COMMANDS_H
#define NYBBLE_COMMANDS_H

int nyb_command_info(int argc, char **argv);
int nyb_command_verify(int argc, char **argv);
int nyb_command_replay(int argc, char **argv);
int nyb_command_bench(int argc, char **argv);
int nyb_command_quantize(int argc, char **argv);
int nyb_command_cache(int argc, char **argv);

#endif
