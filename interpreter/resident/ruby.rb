# The resident kernel of ruby contexts, an argument of ruby -e. Requests come on stdin. Output of
# programs is the exec's own; messages stand in it behind a NUL and the key (see doc.go).
require 'json'

class << (SANDBOXD = Object.new)
  MOST = 48 << 10
  MOST_MESSAGE = 16 << 20

  def serve(language, key)
    @key = key
    ARGV.clear
    @pid = $$
    @main = Thread.main
    @top = TOPLEVEL_BINDING
    @busy = false
    @count = @number = 0
    # Signals that have come, until the last run's end, and those of runs that have ended; the daemon's
    # count of the latter.
    @interrupts = @seen = @passed = @told = 0
    # Descriptors that programs do not get; the user's code may redirect its own.
    @requests, @out, @err = $stdin.dup, $stdout.dup, $stderr.dup
    $stdin.reopen('/dev/null')
    [@out, @err, $stdout, $stderr].each { |io| io.sync = true }
    $0 = $PROGRAM_NAME = 'ruby'
    kernel = self
    @top.receiver.define_singleton_method(:display) do |*values|
      values.empty? ? super() : values.each { |v| kernel.publish(v, false) }
      nil
    end
    handle
    say('h', protocol: 1, language: language, version: RUBY_VERSION)
    while (line = @requests.gets)
      begin
        request = JSON.parse(line)
      rescue JSON::ParserError # cut off by the end of a daemon, or empty
        next
      end
      run(request)
    end
  end

  # An interrupt is raised once in a run, and not at all behind its end.
  def handle
    trap('INT') do
      @interrupts += 1
      if @busy
        @busy = false
        @main.raise(Interrupt, '')
      end
    end
  end

  def run(request)
    late = now(Process::CLOCK_MONOTONIC) + 0.5
    expected = request['interrupts'] || 0
    sleep(0.005) while @interrupts - @passed < expected - @told && now(Process::CLOCK_MONOTONIC) < late
    @passed += [expected - @told, @seen - @passed].max
    @told = expected
    @interrupts = @passed if @interrupts < @passed # one that does not come any more
    @number = request['run']
    @count += 1
    handle
    cpu = used
    old = (request['env'] || {}).to_h { |name, value| [name, ENV[name].tap { ENV[name] = value }] }
    failure = nil
    begin
      begin
        @busy = true
        raise Interrupt, '' if @interrupts > @passed # it came before the code began
        Gem.refresh if request['installed'] && defined?(Gem) # its list of gems is older
        value = evaluate(request['code'])
        publish(value, true) unless value.nil?
      ensure
        @busy = false
      end
    rescue Exception => failure # rubocop:disable Lint/RescueException
    end
    code = failure ? 1 : 0
    code = attempt(1) { Integer(failure.status) & 255 } if SystemExit === failure
    leave(failure, code) if $$ != @pid
    old.each { |name, value| ENV[name] = value }
    flush
    say('x', describe(failure)) if failure
    @seen = @interrupts
    put(@err, "\0#{@key}:s #{@number} 0\n")
    say('d', ok: failure.nil?, count: @count, code: code, cpu_ms: 1000 * (used - cpu), memory_peak: peak)
  end

  # Ends a fork that came back from the user's code, as an interpreter of its own would end.
  def leave(failure, code)
    attempt(nil) { $stderr.puts(describe(failure)[:traceback]) } if failure && !(SystemExit === failure)
    flush
    exit!(code)
  end

  def flush
    [$stdout, $stderr, STDOUT, STDERR].each { |io| attempt(nil) { io.flush } }
  end

  # Calls methods of the user's own objects, which may raise anything.
  def attempt(default)
    yield
  rescue Exception # rubocop:disable Lint/RescueException
    default
  end

  def evaluate(code)
    value = @top.eval(code, "<cell #{@count}>", 1)
    @top.local_variable_set(:_, value)
  end

  def publish(value, main)
    return if $$ != @pid
    bundle = { text: utf8(value.inspect) }
    { html: :to_html, svg: :to_svg, markdown: :to_markdown }.each do |form, method|
      bundle[form] = utf8(value.public_send(method)) if value.respond_to?(method)
    rescue StandardError # it has no such form
    end
    bundle[:is_main_result] = true if main
    data = JSON.generate(bundle)
    if data.bytesize > MOST_MESSAGE
      bundle[:text] = "#{bundle[:text][0, 1000]}... [a result of #{data.bytesize} bytes, more than #{MOST_MESSAGE}]"
      data = JSON.generate(bundle.slice(:text, :is_main_result))
    end
    say('r', data)
  end

  def describe(error)
    name = attempt('Error') { utf8(Interrupt === error ? 'KeyboardInterrupt' : error.class.name || 'Error') }
    value = attempt('') { utf8(error.message) }
    attempt(nil) { clean(error) }
    # Without frames, Ruby would show the kernel's.
    trace = attempt('') { utf8(error.backtrace&.any? ? error.full_message(highlight: false, order: :top) : "#{value} (#{name})") }
    { name: clip(name, 1000), value: clip(value), traceback: clip(trace.chomp) }
  end

  # Takes the kernel's frames out of an error and those that it follows.
  def clean(error, seen = [])
    return if error.nil? || seen.include?(error.object_id)
    seen << error.object_id
    frames = error.backtrace
    error.set_backtrace(frames.reject { |f| f.start_with?('-e:') }) if frames
    clean(error.cause, seen)
  end

  def utf8(text)
    text = text.to_s
    text = text.encode(Encoding::UTF_8, invalid: :replace, undef: :replace) unless text.encoding == Encoding::UTF_8 || text.encoding == Encoding::BINARY
    text.dup.force_encoding(Encoding::UTF_8).scrub
  end

  def clip(text, most = 256 << 10)
    text.length <= most ? text : "#{text[0, most / 2]}\n... [#{text.length - most} characters]\n#{text[-most / 2, most / 2]}"
  end

  def say(kind, message)
    data = (message.is_a?(String) ? message : JSON.generate(message)).b
    Thread.handle_interrupt(Object => :never) do # a message stays whole
      while data.bytesize > MOST
        put(@out, "\0#{@key}:+ #{@number} #{MOST}\n".b + data.byteslice(0, MOST))
        data = data.byteslice(MOST..)
      end
      put(@out, "\0#{@key}:#{kind} #{@number} #{data.bytesize}\n".b + data)
    end
  end

  def put(io, data)
    io.write(data)
  end

  def now(clock) = Process.clock_gettime(clock)

  def used
    t = Process.times
    t.utime + t.stime + t.cutime + t.cstime
  end

  def peak
    File.read('/proc/self/status')[/^VmHWM:\s*(\d+)/, 1].to_i << 10
  rescue SystemCallError
    0
  end
end
SANDBOXD.serve(*ARGV.first(2))
