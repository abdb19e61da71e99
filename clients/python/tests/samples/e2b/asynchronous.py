"""The same with asyncio."""
import asyncio

from e2b_code_interpreter import AsyncSandbox


async def main():
    sandbox = await AsyncSandbox.create()
    execution = await sandbox.run_code("1 + 1", on_result=lambda r: print("result", r.text))
    print(execution.text)
    command = await sandbox.commands.run("echo hi", background=True)
    print((await command.wait()).stdout, end="")
    await sandbox.files.write("/tmp/x", "y")
    print(await sandbox.files.read("/tmp/x"))
    await sandbox.kill()


asyncio.run(main())
# prints: result 2
# prints: 2
# prints: hi
# prints: y
